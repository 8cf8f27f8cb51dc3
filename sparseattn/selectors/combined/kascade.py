"""Kascade: some layers choose, and layers behind an anchor read what it chose. https://arxiv.org/abs/2512.16391

OmniKV (https://openreview.net/forum?id=ulCAPXYXfa) and TidalDecode (https://arxiv.org/abs/2410.05076) are of the same
form, with anchors named by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.layer_choices import Choice
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan
from sparseattn.selectors.abilities import ComparesHeads, Evicts, FollowsLayers
from sparseattn.selectors.base import Ability, Rows, Selector, StepContext
from sparseattn.selectors.combined.wrapper import Wrapper
from sparseattn.selectors.parameters.layer_similarity import Similarity, shared
from sparseattn.utils.hashing import file_hash

NONE = "none"


class Kascade(ComparesHeads, FollowsLayers, Wrapper):
    """In an anchor layer another method chooses; each other layer reads what the nearest anchor before it chose.

    Args:
        artefact: a file of `sparseattn train --method kascade`, which says which KV head of the anchor a KV head
            reads, and which layers are anchors where `anchors` is a number; "none": a KV head reads what the KV head of
            its own number chose.
        anchors: how many layers choose, by the file, or which, a list of numbers. Layers before the first anchor choose
            for themselves alone.
        inner: what anchors choose by, a selector or its name: the paper's exact probabilities by default, summed over a
            group's query heads. Any but those that drop rows, and those that store rows in an order of their own, as
            another layer stores its rows otherwise.

    A layer that reads another's choice holds no index, scans nothing and has no tail; a bias comes with the rows. It
    needs the other layers of its model at the same step: `SparseCache` and comparisons show them to it (`board`), and a
    `KVCache` of its own refuses it. All layers have one budget, sink and window, and seal alike; of an anchor whose
    budget is larger others read the first rows, if `inner` names its rows best first (`best_first`), as `exact` does.

    The paper's layer 0 attends to every row, and so do the anchors of the other two: here each reads its own choice.
    `dense_layers` leaves layers dense, and an anchor cannot be one of them; `roles.papers.tidaldecode` gives anchors
    every row.

    Raises:
        ValueError: no anchor or numbers that do not rise, an inner method that drops rows, a file that is not there; in
            `check_shape` and with the first rows what does not fit the layer.
    """

    late = ("_held",)

    def __init__(
        self, artefact: str = NONE, anchors: int | list[int] = 5, inner: Selector | str = "exact:group=softmax"
    ) -> None:
        super().__init__(inner)
        self.artefact = artefact
        self.anchors = anchors if isinstance(anchors, int) else list(anchors)
        if isinstance(self.anchors, bool) or not _rising(self.anchors):
            raise ValueError(
                f"anchors are how many layers choose, 1 or more, or their numbers, rising, such as [0,2,8], got "
                f"{anchors!r}"
            )
        if self.inner.find(Evicts):
            raise ValueError(
                f"layers read what another layer chose, of rows that they all hold, and {self.inner} drops rows in "
                f"each layer apart: take a method that does not evict"
            )
        self.shown = 0  # rows, padding included
        self._held: Similarity | None = None
        self.similarity()

    # -- who reads what ------------------------------------------------------------------------------------------------

    def similarity(self) -> Similarity | None:
        """Return the file, read once for all layers; None where there is none."""
        if self._held is None and self.artefact != NONE:
            self._held = shared(self.artefact)
        return self._held

    def chosen_anchors(self) -> list[int]:
        """Return the layers that choose for others; ValueError for a number of them without a file."""
        if not isinstance(self.anchors, int):
            return self.anchors
        if (similarity := self.similarity()) is None:
            raise ValueError(
                f"which {self.anchors} layers are anchors, a file says: `sparseattn train TRACES --method kascade "
                f"--out FILE`, then kascade:artefact=FILE,anchors={self.anchors}; or name them, as in anchors=[0,2,8]"
            )
        return similarity.anchors(self.anchors)

    @property
    def follows(self) -> int | None:
        """The layer whose choice this one reads; None where it chooses."""
        anchors = self.chosen_anchors()
        anchor = max((layer for layer in anchors if layer <= self.layer), default=self.layer)
        return None if anchor == self.layer else anchor

    def find(self, ability: type[Ability]) -> list[Ability]:
        if self.follows is None:
            return super().find(ability)
        own: list[Any] = [self] if self.has(ability) else []
        return own  # of `inner`, which builds and weighs nothing here, nothing is asked

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        anchor = self.follows
        if anchor is not None:
            self._map(anchor, heads if self.layer_context.heads is None else self.layer_context.heads.of)
            return
        if (own := self.layer_context.heads) is not None:
            raise ValueError(
                f"{self} chooses in layer {self.layer} for all of its KV heads, and is given {len(own.which)} "
                f"of {own.of}: give the layer one role"
            )
        super().check_shape(heads, group, size)

    def _map(self, anchor: int, heads: int) -> Sequence[int]:
        """For each of the layer's KV heads, the anchor's whose choice it reads."""
        similarity = self.similarity()
        if similarity is None:
            return range(heads)
        heads_of = similarity.map(anchor, self.layer)
        if len(heads_of) != heads:
            raise ValueError(
                f"{self.artefact} is of layers of {len(heads_of)} KV heads, layer {self.layer} here has {heads}: it is "
                f"of another model"
            )
        return heads_of

    # -- what it does --------------------------------------------------------------------------------------------------

    def fix(self, rows: int, seal: int) -> None:
        if self.follows is None:
            self.inner.fix(rows, seal)

    def reset(self) -> None:
        super().reset()
        self.shown = 0

    def append(self, rows: Rows) -> None:
        anchor = self.follows
        self.shown += rows.keys.shape[2]
        if anchor is not None:
            if self.layer_context.board is None:
                raise ValueError(
                    f"layer {self.layer} reads what layer {anchor} chose, and a KVCache by itself knows no other "
                    f"layer: use it in a SparseCache or a comparison, or give each layer's selector one Board"
                )
            return
        if self.inner.append(rows) is not None:
            raise ValueError(
                f"{self.inner} stores rows in an order of its own, and layers that read the choice of layer "
                f"{self.layer} store theirs otherwise: take a method that leaves rows where they are"
            )

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        anchor = self.follows
        if anchor is not None:
            return self._read(anchor, query, budget)
        chosen = self.inner.counted(self.inner.select(query, step, budget), query, step, budget)
        if (board := self.layer_context.board) is not None and self.layer in self.chosen_anchors():
            board.put(self.layer, Choice(chosen, budget, self.shown))
        return chosen

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        scan = self.inner.full_scan(query, sealed, budget)
        if self.follows is None or scan is None:
            return scan
        return replace(scan, scanned=0, read=0, launches=(Launch("operator", count=self.operators),), tail=0)

    def _first(self, choice: Choice, budget: int) -> Choice:
        """Return the first rows of what a layer of a larger budget chose, where `inner` names its rows best first."""
        if choice.budget <= budget or not self.inner.best_first:
            return choice
        chosen = choice.selection
        bias = None if chosen.bias is None else chosen.bias[..., :budget]
        start, length = chosen.start[..., :budget], chosen.length[..., :budget]
        return Choice(replace(chosen, start=start, length=length, bias=bias), budget, choice.rows)

    def _read(self, anchor: int, query: Tensor, budget: int) -> Selection:
        batch, heads, group, _ = query.shape
        choice = None if self.layer_context.board is None else self.layer_context.board.get(anchor)
        if choice is None:
            raise ValueError(
                f"layer {self.layer} reads what layer {anchor} chose, and that layer chose nothing at this step: it "
                f"runs before, is not dense, and has the same method"
            )
        choice = self._first(choice, budget)
        if (choice.rows, choice.budget) != (self.shown, budget):
            raise ValueError(
                f"layer {self.layer} has {self.shown} sealed rows and a budget of {budget} rows, layer {anchor}, whose "
                f"choice it reads, {choice.rows} and {choice.budget}: give all layers one budget, sink, window and seal"
            )
        chosen, every = choice.selection, heads if self.layer_context.heads is None else self.layer_context.heads.of
        lists = chosen.start.shape[1]
        if lists not in (every, every * group) or len(chosen.start) != batch:
            raise ValueError(
                f"layer {anchor} chose for {lists} heads of {len(chosen.start)} sequences, and layer {self.layer} has "
                f"{every} KV heads, of {group} query heads each, and {batch} sequences"
            )
        which = [self._map(anchor, every)[head] for head in self.head_numbers(heads)]
        start, length, bias = (
            _of_heads(x if x is None else x.to(query.device), which, every)  # layers may lie on several devices
            for x in (chosen.start, chosen.length, chosen.bias)
        )
        assert start is not None
        assert length is not None
        nothing = torch.zeros(batch, start.shape[1], dtype=torch.int64, device=start.device)
        return Selection(start, length, chosen.span, nothing, nothing[:, :heads], chosen.whole, bias)

    def index_arguments(self) -> dict[str, Any]:
        """Of a file its content counts, wherever it lies."""
        given = super().index_arguments()
        return given if self.artefact == NONE else given | {"artefact": file_hash(self.artefact)}

    def source(self) -> str:
        return super().source() + ("" if self.artefact == NONE else f" {file_hash(self.artefact)[:16]}")


def _rising(anchors: int | Sequence[Any]) -> bool:
    if isinstance(anchors, int):
        return anchors >= 1
    whole = all(type(layer) is int and layer >= 0 for layer in anchors)
    return bool(anchors) and whole and list(anchors) == sorted({*anchors})


def _of_heads(x: Tensor | None, which: Sequence[int], heads: int) -> Tensor | None:
    """Of `[B,H or HG,S]` the KV heads `which` of `heads`, those of their query heads together."""
    if x is None or list(which) == list(range(heads)):
        return x
    # A slice a head: no index has to come from the host.
    each = x.unflatten(1, (heads, -1))
    return torch.stack([each[:, head] for head in which], 1).flatten(1, 2)
