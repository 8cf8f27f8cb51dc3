"""ZipCache's saliency: what a row gets of a tenth of the prompt's queries, over how many queries see it.

https://arxiv.org/abs/2405.14256
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels.random_draws import draws, streams
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_share
from sparseattn.selectors.eviction.attention_received import received
from sparseattn.selectors.eviction.base import Evicting, every_row
from sparseattn.selectors.eviction.summed_base import prompt_queries


class ZipCache(Evicting):
    """Holds the prompt's rows with the largest normalised sums of attention weights.

    The sums are of probe queries: the newest ones of the prompt, and as many drawn among the others. A row's sum is
    divided by how many of the prompt's queries see it, so that old rows have no advantage.

    Args:
        share: of the prompt's queries, the newest that probe, and as many drawn ones; 0.05 in the authors' code.
        seed: of the draw.

    One choice per KV head, by the sum over its query group, as in the authors' code (ThisisBillhe/ZipCache,
    `modeling_llama.py`). It keeps rows that are less salient in fewer bits; here these are dropped. It takes rows of
    the answer in groups, whose own last query probes them; here they come before all rows of the prompt, the newest
    first, as SnapKV's do. At least one query is the newest and one is drawn.

    Raises:
        ValueError: a share outside 0 to 1.
    """

    def __init__(self, share: float = 0.05, seed: int = 0) -> None:
        super().__init__()
        check_share(share)
        self.share, self.seed = share, seed
        self.queries_share, self.last_queries = 1.0, 1

    @classmethod
    def paper(cls, answer: int = 4096) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`, for answers of up to `answer` tokens, which are all
        held."""
        return {"selector": cls(), "sink": 0, "window": 1, "seal": answer}

    def first(self, rows: Rows) -> Tensor:
        late = (2.0 + rows.positions)[:, None].expand(-1, rows.keys.shape[1], -1)
        if rows.queries is None or rows.last_queries is None:
            return late
        queries, at = prompt_queries(rows)
        probes = self.probes(at)
        which = (probes >= 0).any(0).nonzero()[:, 0]
        sums = received(queries[:, :, :, which], probes[:, which], every_row(rows), self.layer_context.scale)[0]
        count = at.amax(1, keepdim=True) + 1 - rows.positions  # [B,n] queries that see a row
        return sums / count.clamp(min=1)[:, None]

    def probes(self, at: Tensor) -> Tensor:
        """Return `[B,m]` int64: of the positions of queries `at` `[B,m]` those that probe, -1 for others."""
        newest = at.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # 0 for the newest
        count = (at >= 0).sum(1, keepdim=True)
        many = (self.share * count).long().clamp(min=1)
        stream = streams(self.seed, self.layer, [0], at.device)
        drawn = draws(stream, torch.zeros_like(at[:, 0]), at)[:, 0]  # [B,m]
        others = (newest >= many) & (at >= 0)
        rank = torch.where(others, drawn, torch.iinfo(torch.int64).max).argsort(dim=1, stable=True).argsort(dim=1)
        return torch.where((newest < many) & (at >= 0) | others & (rank < many), at, -1)
