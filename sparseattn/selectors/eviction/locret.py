"""Locret: trained heads foresee how much each token of the prompt will be attended to. https://arxiv.org/abs/2410.01805"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.abilities import ComparesHeads
from sparseattn.selectors.base import LayerContext, Rows
from sparseattn.selectors.checks import check_least, known_rope
from sparseattn.selectors.eviction.base import Evicting
from sparseattn.selectors.parameters.channel_calibration import Calibration, CalibrationError, shared
from sparseattn.selectors.parameters.retaining_heads import foreseen, random_heads
from sparseattn.utils.hashing import file_hash

RANDOM = "random"  # stands for weights that are not trained
METHOD = "locret"


class Locret(ComparesHeads, Evicting):
    """Holds the prompt's rows of the largest scores, which a trained network foresees of each token by itself.

    A network of one hidden layer reads the queries, keys and values of all heads of a token, before RoPE, and gives a
    score for each KV head: the largest logit that a later query will have with the row. So what is held is known as the
    token comes, with no later query.

    Args:
        artefact: a file that `sparseattn train --method locret` has made of traces; "random" (default): weights are
            drawn, which says what training is worth.
        hidden: width of the network that is drawn, 1,024 in the paper; a file has its own.
        seed: of the weights that are drawn.

    Rows of the answer come before all rows of the prompt, the newest first: the authors' code holds all of them besides
    its budget, and so does `Locret.paper()`. That code drops rows chunk by chunk as the prompt is read, and never the
    newest 2,500 before the last chunk; here all of the prompt is there, and is chosen from once. The last 100 rows of
    the prompt are its window.

    Raises:
        ValueError: a layer whose RoPE is not known, or some heads of one alone; a file of another method or shape.
    """

    late = ("_held",)

    def __init__(self, artefact: str = RANDOM, hidden: int = 1024, seed: int = 0) -> None:
        super().__init__()
        check_least(hidden=(hidden, 1))
        self.artefact, self.hidden, self.seed = artefact, hidden, seed
        self.queries_share = 1.0
        self._held: Calibration | None = None
        if artefact != RANDOM:
            self.calibration()

    @classmethod
    def paper(cls, artefact: str, answer: int = 4096) -> dict[str, Any]:
        """Return the paper's setting with a trained file, as arguments of `KVCache`, for answers of up to `answer`
        tokens."""
        return {"selector": cls(artefact), "sink": 0, "window": 100, "seal": answer}

    def calibration(self) -> Calibration:
        """Return the file, read once for all layers; ValueError where it is none of this method."""
        if self._held is None:
            calibration = shared(self.artefact)
            if calibration.method != METHOD:
                raise CalibrationError(
                    f"{self.artefact} is a calibration for {calibration.method}, and {METHOD} needs one of "
                    f"`sparseattn train --method {METHOD}`"
                )
            self._held = calibration
        return self._held

    def bind(self, context: LayerContext) -> None:
        super().bind(context)
        if self.artefact != RANDOM:
            self.calibration().holds(context.layer)

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        rope, some = self._rope(), self.layer_context.heads
        rope.check_size(size)
        if some is not None and some.of != heads:
            raise ValueError(f"{self} reads all {some.of} KV heads of a layer, and is given {heads} of them")
        if self.artefact != RANDOM:
            parameters = self.calibration().check(self.layer, heads, size, rope)
            if group not in (None, learned := parameters["queries"].shape[1]):
                raise CalibrationError(f"{self.artefact} is for {learned} query heads of a KV head, here are {group}")

    def _rope(self) -> Rope:
        instead = "take a method that reads none, such as snapkv"
        return known_rope(self, self.layer_context, "reads queries and keys before RoPE", instead)

    def index_arguments(self) -> dict[str, Any]:
        """Of a file its content counts, wherever it lies."""
        given = super().index_arguments()
        return given if self.artefact == RANDOM else given | {"artefact": file_hash(self.artefact)}

    def source(self) -> str:
        return super().source() + ("" if self.artefact == RANDOM else f" {file_hash(self.artefact)[:16]}")

    def first(self, rows: Rows) -> Tensor:
        if self.worth.rows:
            return (1.0 + rows.positions)[:, None].expand(rows.keys.shape[:3])
        assert rows.queries is not None  # a share of 1: those of every row
        rope, at = self._rope(), rows.positions.clamp(min=0)
        heads, group, _, size = rows.queries.shape[1:]
        if self.artefact == RANDOM:
            weights = random_heads(heads, group, size, self.hidden, self.seed, self.layer)
        else:
            weights = self.calibration().holds(self.layer)
        score = foreseen(
            {name: part.to(rows.keys.device) for name, part in weights.items()},
            rope.unrotate(rows.queries.float(), at[:, None, None]),
            rope.unrotate(rows.keys.float(), at[:, None]),
            rows.values.float(),
        )
        return score / (1 + score.abs())  # below 1, the answer's least
