"""What a method is told: of the layer it serves, `LayerContext`, and of one decode step, `StepContext`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from sparseattn.core.deal import Deal
    from sparseattn.core.layer_choices import Board
    from sparseattn.core.rope import Rope


class Heads(NamedTuple):
    """Some of a layer's KV heads.

    Args:
        which: their numbers in the layer, ascending.
        of: how many the layer has.
    """

    which: tuple[int, ...]
    of: int

    def among(self, whole: Heads | None) -> Heads:
        """Return the same heads by their numbers in a layer of which these are numbered among `whole`; None: all."""
        return self if whole is None else Heads(tuple(whole.which[head] for head in self.which), whole.of)


class RecordedIndex(NamedTuple):
    """What an index of a model's own chose.

    Args:
        rows: `[Hs,Q,S]` integers: positions of tokens, best first where the index ranks them, -1 for unused places.
        first: position of the first of the Q tokens that it chose for; the others follow.
        row_bytes: bytes of its keys for each token, one copy for all heads; None: not known.
    """

    rows: Tensor
    first: int
    row_bytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerContext:
    """The layer that a selector serves. What the caller does not know is None.

    Args:
        layer: its number in the model.
        depth: layers of the model.
        heads: the KV heads that the selector is shown, where others have another method (`roles`) or are in another
            process (tensor parallelism); None: all of them.
        rope: the layer's rotary embedding, for methods that need keys before RoPE.
        scale: factor of the layer's logits; None: `1/sqrt(head_dim)`.
        key_bytes: bytes that an element of a key counts as, where a comparison computes in float32 what a model keeps
            in 16 bits; None: the bytes that it has.
        board: where a layer leaves its choice for layers behind it, one for all layers of a model.
        native: what the layer's own index chose for the tokens that are replayed, as a trace holds it.
    """

    layer: int = 0
    depth: int | None = None
    heads: Heads | None = None
    rope: Rope | None = None
    scale: float | None = None
    key_bytes: int | None = None
    board: Board | None = None
    native: RecordedIndex | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """One decode step, as a cache tells it to `Selector.select`.

    Args:
        positions: `[B]` int64, the query's token positions.
        valid: `[B,N]` bool, the sealed rows that are no padding, in stored order. Padding comes in whole units of the
            selector. With `KVCache(fixed=True)` N is all rows there will be.
        sealed: sealed rows of each sequence, without padding.
        counted: whether what choosing reads is to be counted (`Selection.scanned`, `scan_bytes`): comparisons ask for
            it, decoding does not.
        unsealed_lse: `[B,H,G]` float32, for methods that weigh what every query reads (`WeighsUnsealed`): the
            log-sum-exp of the logits of sink and unsealed rows, -inf for none.
        lookahead: `[B,H,G,D]`, after RoPE, for methods that look ahead (`LooksAhead`): the query that this layer's
            projection makes of the input of the attention layer before. None: nobody has made one.
        deal: which of a sequence's sealed rows these are, where they are dealt to several processes; None: all.
    """

    positions: Tensor
    valid: Tensor
    sealed: Sequence[int] = ()
    counted: bool = False
    unsealed_lse: Tensor | None = None
    lookahead: Tensor | None = None
    deal: Deal | None = None
