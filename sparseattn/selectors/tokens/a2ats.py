"""A2ATS: every row ranked by one centroid for its key before RoPE, with the query at a fixed distance.

https://arxiv.org/abs/2502.12665
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Weighed
from sparseattn.core.step_cost import Launch
from sparseattn.kernels import codebooks
from sparseattn.kernels.nearest_codes import dispatch as nearest_codes
from sparseattn.selectors.abilities import LearnsFromQueries
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.checks import check_least, check_share, half, into_range, warn_of_keys_as_queries
from sparseattn.selectors.parameters.window_codes import at_distance, before_rope, window_codes
from sparseattn.selectors.tokens.calibrated_base import PROMPT, FromCalibration
from sparseattn.selectors.tokens.codebook_base import Coded
from sparseattn.utils.hashing import stream

MOST_BITS = 12  # 4,096 centroids, the paper's


class A2ATS(LearnsFromQueries, FromCalibration, Coded):
    """Reads the rows whose centroids have the largest products with the query at a fixed distance.

    Windowed RoPE: within the cache's window attention is what it is; farther rows are ranked as if all of them were
    `distance` tokens before the query. So keys are coded before RoPE, and a codebook holds for any position. Codes are
    aware of queries: the second moment C of queries at that distance has a factor, `C = L L'`, and a key k is named by
    the nearest centroid c of `k L`, which errs least in the logits of these queries. Its product with the query is that
    of c with `L^-1 q`.

    Args:
        bits: of a name, 1 to 12, with the prompt's own codebook: 8 (default), 256 centroids in a byte. A file has 12
            bits, as the paper, or what it was trained with.
        artefact: a file that `sparseattn train --method a2ats` has made of traces; "prompt" (default): factor and
            centroids are this prompt's.
        distance: tokens between every far row and the query; 2,048 in the authors' code.
        sample: most keys of a KV head that centroids are learned from, drawn at random; 0: all of them.
        share: share of the prompt's queries for the second moment, evenly spaced.
        seed: of the draw and of the first centroids.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.

    Departures, from its code (junhuihe-hjh/A2ATS). There every query head of a group chooses, and the group reads the
    union, of as many rows as that has; here a budget is a limit, and the group votes. Rows of the answer get codes when
    they are sealed. The default, without a file, is ours. k-means runs 25 rounds, there up to 300 from better first
    centroids. Centroids have 16 bits.

    `scan_bytes`: the names of every row, and centroids and factor once per KV head.

    Raises:
        ValueError: a layer whose RoPE is not known.
    """

    method = "a2ats"
    without_rope = "take a method that codes keys as they are, such as querypq"
    learns_once = True
    operators = 40

    def __init__(
        self,
        bits: int = 8,
        artefact: str = PROMPT,
        distance: int = 2048,
        sample: int = 8192,
        share: float = 0.1,
        seed: int = 0,
        group: str = "softmax",
    ) -> None:
        super().__init__(group)
        check_share(share)
        check_least(distance=(distance, 0), sample=(sample, 0), bits=(bits, 1))
        if bits > MOST_BITS:
            raise ValueError(f"bits is 1 to {MOST_BITS}, got {bits}")
        self.bits, self.distance, self.sample, self.share, self.seed = bits, distance, sample, share, seed
        self.queries_share = share if artefact == PROMPT else 0.0
        self.factor = RowBuffer(2)  # [B,H,D,D] float32
        self.back = RowBuffer(2)  # [B,H,D,D] float32, its inverse
        self.read_from(artefact, roped=False)

    @classmethod
    def paper(cls, artefact: str) -> dict[str, Any]:
        """Return the paper's setting with a trained file, as arguments of `KVCache`."""
        return {"selector": cls(artefact=artefact, group="each"), "sink": 8, "window": 64, "seal": 1}

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        self._rope()
        super().check_shape(heads, group, size)

    @property
    def _named(self) -> int:
        """K."""
        if self.artefact == PROMPT:
            return 1 << self.bits
        return self.calibration().holds(self.layer)["centroids"].shape[2]

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        keys = rows.keys[0]
        learned = self.filed(keys) if self.artefact != PROMPT else self._prompts(rows)
        kind = half(keys)
        less = into_range(learned["centroids"], kind)  # [H] of both, which changes no name and no product
        factor, centroids = learned["factor"] * less[:, None, None], learned["centroids"] * less[:, None, None, None]
        back = torch.linalg.inv(factor.double()).float()
        return {"factor": factor, "back": back, "centroids": centroids.to(kind)}

    def _prompts(self, rows: Rows) -> dict[str, Tensor]:
        keys, rope, places = rows.keys[0], self._rope_on(rows.keys.device), rows.positions[0]
        which = torch.randperm(keys.shape[1], generator=stream(self.seed, "sample"))[: self.sample or keys.shape[1]]
        which = which.sort().values.to(keys.device)
        if rows.queries is None or rows.query_positions is None or not rows.query_positions.numel():
            warn_of_keys_as_queries(self, len(keys), len(keys))
            queries, query_places = keys[:, None, which].float(), places[which]
        else:
            queries, query_places = rows.queries[0].float(), rows.query_positions[0]
        sample = before_rope(keys[:, which].float(), places[which], rope)
        return window_codes(sample, at_distance(queries, query_places, rope, self.distance), self.bits, self.seed)

    def append(self, rows: Rows) -> None:
        self.learn(rows)
        keys = before_rope(rows.keys.float(), rows.positions[:, None].clamp(min=0), self._rope_on(rows.keys.device))
        self.codes.append(self.encode(keys))

    def encode(self, keys: Tensor) -> Tensor:
        return nearest_codes.names(keys @ self.factor.data, self.centroids.data).mT

    def tables(self, query: Tensor) -> Tensor:
        return codebooks.products(query @ self.back.visible.mT, self.centroids.visible)

    # -- queries at the distance ---------------------------------------------------------------------------------------

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return super().select(self._far(query, step), step, budget)

    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        return super().weigh(self._far(query, step), step, budget)

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        return super().head_scores(self._far(query, step), step)

    def _far(self, query: Tensor, step: StepContext) -> Tensor:
        return at_distance(query.float(), step.positions[:, None, None], self._rope_on(query.device), self.distance)

    # -- costs ---------------------------------------------------------------------------------------------------------

    def names(self, size: int) -> tuple[int, int]:
        return (1 if self._named <= codebooks.BYTE else 2), self._named * size

    def reads(self, query: Tensor) -> tuple[int, int]:
        size = query.shape[3]
        row, books = self.names(size)
        return row, 2 * books + 4 * size * size

    def scoring(self, query: Tensor, sealed: int) -> Launch:
        size, every = query.shape[3], query.shape[:3].numel()
        books = self.names(size)[1]
        return Launch("names", flops=2.0 * every * (books + size * size), entries=every * sealed)
