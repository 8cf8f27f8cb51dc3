"""One layer of a `SparseCache`: stores what transformers hands it and answers the layer's attention calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.cache.kv_cache import KVCache
from sparseattn.models.attention_routing import Call, delegate, not_held
from sparseattn.models.errors import ModelError
from sparseattn.models.head_group import SparseHeads
from sparseattn.models.transformers_classes import CacheLayerMixin
from sparseattn.roles.roles import together


@dataclass(frozen=True, eq=False)
class Run:
    """What the layers need to know of the forward pass in progress.

    Args:
        cache: the `SparseCache` that the pass was given.
        original: name of the model's own attention implementation.
        sparse: how many of the pass's last tokens go through the sparse path, one by one.
        positions: `[B,n]` int64 on the CPU, negative for padding; None: no padding, counting on from the newest row.
    """

    cache: Any
    original: str
    sparse: int
    positions: Tensor | None


# Set while a prepared model runs, by what surrounds its forward. One per thread, so that passes of several models
# and threads do not mix.
RUNNING: ContextVar[Run | None] = ContextVar("sparseattn_running", default=None)


def another_dtype(held: torch.dtype, now: torch.dtype) -> str:
    """What to say where a model has changed its dtype behind the back of its cache."""
    return (
        f"this SparseCache holds keys and values in {_short(held)}, and the model now makes them in {_short(now)} "
        f"(model.to): make a new SparseCache, or go back with model.to({held})"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SparseLayer(CacheLayerMixin):
    """The rows of one layer in a `KVCache` with a selector, or in one for each method that its KV heads have.

    `update` only takes note of new keys and values: they are stored when the attention call brings the queries too.

    Args:
        parts: this layer's caches; each KV head is in one.
        impl: as in `attend`.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False  # shapes come with the first rows

    def __init__(self, parts: Sequence[SparseHeads], impl: str | None = None) -> None:
        super().__init__()
        self.parts, self.impl = tuple(parts), impl
        self.columns = 0  # tokens taken in, padding included
        self._given: Tensor | None = None
        self.forget_counts()

    @property
    def rows(self) -> KVCache:
        """The one cache of a layer whose heads have one method; ValueError where they have several."""
        if len(self.parts) > 1:
            raise ValueError(f"the heads of this layer have {len(self.parts)} methods, each with a cache in `parts`")
        return self.parts[0].rows

    @property
    def label(self) -> str:
        """The method, or each with its KV heads."""
        if len(self.parts) == 1:
            return self.parts[0].share.label
        named = ((part.share.label, part.share.heads) for part in self.parts)
        return ", ".join(f"{label} ({len(heads.which)} of {heads.of} heads)" for label, heads in named if heads)

    def forget_counts(self) -> None:
        """Counts anew."""
        self.sparse_calls, self.dense_calls = 0, 0
        for part in self.parts:
            part.forget_counts()

    @property
    def mean_rows(self) -> float:
        """Rows attended by a query head in a sparse call, mean over calls, sequences and heads; 0 without any."""
        return self._mean(lambda part: part.mean_rows)

    @property
    def mean_context(self) -> float:
        """Rows stored at a sparse call, mean over calls and sequences; 0 without any."""
        return self._mean(lambda part: part.mean_context)

    @property
    def bytes_share(self) -> float:
        """Bytes read to choose and to attend over bytes stored, mean over calls, sequences and KV heads; NaN without
        any, where the caches were made without `check`, and where a selector does not say what it reads."""
        return self._mean(lambda part: part.bytes_share)

    def _mean(self, number: Callable[[SparseHeads], float]) -> float:
        """Mean over KV heads."""
        weights = [1 if part.share.heads is None else len(part.share.heads.which) for part in self.parts]
        return sum(w * number(part) for w, part in zip(weights, self.parts, strict=True)) / sum(weights)

    # -- attention ---------------------------------------------------------------------------------------------------

    def attend(self, call: Call, run: Run) -> Tensor:
        """Stores the call's new rows and returns `[B,n,HG,D]`: the first n - `run.sparse` tokens attend densely, the
        others one by one through the selector."""
        self._check(call)
        batch, named, new, size = call.query.shape
        query = call.query.view(batch, call.key.shape[1], -1, new, size)  # [B,H,G,n,D]
        dense = new - run.sparse
        parts = []
        if dense:
            parts.append(self._attend_densely(call, query, dense, run))
            self.dense_calls += 1
        for t in range(dense, new):
            self._store(call, query, slice(t, t + 1), run)
            run.cache.board.step = t
            heads = [part.decode(query.select(3, t), call.scale, self.impl) for part in self.parts]
            parts.append(self._together(heads).reshape(batch, 1, named, size))
            self.sparse_calls += 1
        self.columns += new
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _together(self, heads: Sequence[Tensor]) -> Tensor:
        """What each part gave, `[B,h,...]`, as `[B,H,...]`."""
        return together([part.share for part in self.parts], heads)

    def _check(self, call: Call) -> None:
        if call.key is not self._given:
            raise ModelError(
                f"layer {call.layer} attends to other keys than it gave to the cache, so they cannot be selected: "
                f"make it dense with dense_layers"
            )
        self._given = None
        if (beyond := not_held(call)) is not None:
            raise ModelError(f"layer {call.layer} {beyond}, which sparse attention does not compute: make it dense")
        if call.options.get("dropout"):
            raise ModelError(f"layer {call.layer} drops attention weights: put the model in eval() mode")
        if torch.is_grad_enabled() and call.query.requires_grad:
            raise ModelError("sparse attention has no gradients: run the model under torch.no_grad()")

    def _store(self, call: Call, query: Tensor, part: slice, run: Run) -> None:
        keys, values, positions = call.key, call.value, run.positions
        if part != slice(0, keys.shape[2]):
            keys, values, query = keys[:, :, part], values[:, :, part], query[:, :, :, part]
            positions = None if positions is None else positions[:, part]
        for heads in self.parts:
            heads.append(keys, values, query, positions)

    def _attend_densely(self, call: Call, query: Tensor, new: int, run: Run) -> Tensor:
        """The first `new` tokens of the call, each over all rows up to its own."""
        part = slice(0, new)
        if not self.columns:  # nothing is stored: the model's own attention, over what the call itself brings
            self._store(call, query, part, run)
            if new < call.query.shape[2]:
                mask = call.mask
                if mask is not None:
                    mask = mask[..., part] if mask.ndim == 2 else mask[..., part, part]
                own = call.query[:, :, part], call.key[:, :, part], call.value[:, :, part]
                call = Call(call.module, *own, mask, call.options)
            return delegate(call, run.original)[0]
        block = self._block(call.mask, new, run).to(call.key.device)  # [B,1,n,n]
        outs = [self._attend_stored(heads, call, new, block) for heads in self.parts]  # each [B,h,G,n,D]
        self._store(call, query, part, run)
        return self._together(outs).flatten(1, 2).transpose(1, 2)

    def _attend_stored(self, heads: SparseHeads, call: Call, new: int, block: Tensor) -> Tensor:
        """`[B,h,G,n,D]` of a part's heads: the first `new` tokens over what it holds and over each other.

        Stored rows lie without padding and perhaps in a selector's order. All of them are before the new ones, whose
        part of the model's mask, `block`, says what these see of each other.
        """
        part, total = slice(0, new), call.key.shape[1]
        group = call.query.shape[1] // total
        keys, values, real = heads.rows.everything()
        stored, count = keys.shape[2], keys.shape[1]
        block = heads.of_queries(block, total)
        if bool(real.all()):
            seen = block.new_ones(1, 1, 1, stored)
        else:
            keys, values = (x.masked_fill(~real[..., None], 0.0) for x in (keys, values))
            alike = bool((real == real[:, :1]).all())
            seen = (real[:, :1] if alike else real.repeat_interleave(group, 1))[:, :, None]  # [B,1 or hG,1,N]
        sizes = [max(a, b) for a, b in zip(seen.shape[:2], block.shape[:2], strict=True)]
        mask = torch.cat([seen.expand(*sizes, new, -1), block.expand(*sizes, -1, -1)], -1)
        keys, values = (
            torch.cat([x, heads.of(y)[:, :, part]], 2)
            for x, y in zip((keys, values), (call.key, call.value), strict=True)
        )
        each = group
        if keys.is_cuda:  # where a mask and grouped heads together leave only the kernel that stores all logits
            keys, values, each = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), 1
        query = heads.of_queries(call.query, total)[:, :, part]
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=call.scale, enable_gqa=each > 1)
        return out.unflatten(1, (count, group))

    def _block(self, mask: Any, new: int, run: Run) -> Tensor:
        """`[B,1,n,n]` bool: which of the `new` tokens each of them sees."""
        if isinstance(mask, Tensor) and mask.ndim == 4:
            block = mask[:, :, :new, self.columns : self.columns + new]
            return block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        block = torch.ones(new, new, dtype=torch.bool).tril()[None, None]
        return block if run.positions is None else block & (run.positions[:, None, None, :new] >= 0)

    def keep_unsealed(self, tokens: int) -> None:
        """From now on the newest `tokens` or more stay unsealed, so that they can be taken back."""
        for part in self.parts:
            part.rows.rollback = max(part.rows.rollback, tokens - part.rows.window)

    # -- what transformers asks of a layer -----------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first rows stored tell all."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes note of new rows `[B,H,n,D]` and returns them: the attention call finds the stored ones by itself.

        Raises:
            RuntimeError: outside a pass of the prepared model, or where rows it was given before were never attended.
            ValueError: rows of another dtype than those that are stored.
        """
        run = RUNNING.get()
        if run is None or run.cache.prepared.undone:
            raise RuntimeError(
                "the model of this SparseCache has its own attention back, which cannot read it: make a new one"
            )
        if self._given is not None:
            raise RuntimeError(
                "this layer is given new rows, and those it was given before were never attended to, as the pass that "
                "brought them was cut short or went past sparse attention: take the cache back with crop(0), or make "
                "a new one"
            )
        held = self.parts[0].rows
        if held.batch and held.keys.dtype != key_states.dtype:
            raise ValueError(another_dtype(held.keys.dtype, key_states.dtype))
        self._given, self.is_initialized = key_states, True
        return key_states, value_states

    @property
    def left(self) -> bool:
        """Whether it was given rows that no attention call has come for."""
        return self._given is not None

    @property
    def stored(self) -> tuple[Any, ...]:
        """What changes with every row that it takes: for comparing the layer with itself."""
        return self.columns, self.left, *(part.rows.counts[0] for part in self.parts)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(columns of the mask, 0); before transformers 5.4 or so the argument is the positions of the new tokens."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.columns + new, 0

    def get_seq_length(self) -> int:
        """Tokens taken in, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def crop_rows(self, tokens: int, drop: Tensor) -> None:
        """Forgets the newest `tokens`, which are `drop` `[B]` rows of each sequence."""
        if tokens:
            for part in self.parts:
                part.rows.crop(drop)
            self.columns -= tokens

    def take_back(self, tokens: int, counts: Tensor) -> None:
        """Goes back to `tokens`, which are `counts` `[B]` rows of each sequence, from a pass that was cut short.

        Raises:
            ValueError: some of the rows that go are sealed.
            RuntimeError: the pass was cut short while rows were stored or sealed, so that these are void.
        """
        for part in self.parts:
            part.rows.crop(part.rows.lengths - counts)
        self.columns, self._given = tokens, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence `beam_idx[b]` was."""
        if self.columns:
            for part in self.parts:
                part.rows.reorder(beam_idx.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        if self.columns:
            self.reorder_cache(self._sequences().repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices`."""
        if self.columns:
            self.reorder_cache(self._sequences()[indices.cpu()])

    def _sequences(self) -> Tensor:
        return torch.arange(self.parts[0].rows.batch)

    def reset(self) -> None:
        """Forgets every row; counts stay."""
        for part in self.parts:
            part.rows.reset()
        self.columns, self._given, self.is_initialized = 0, None, False

    def clone(self) -> SparseLayer:
        """An independent copy that counts anew."""
        twin = copy.copy(self)
        twin.parts = tuple(part.clone() for part in self.parts)
        twin.forget_counts()
        return twin

    def __repr__(self) -> str:
        return f"SparseLayer({'; '.join(map(repr, self.parts))})"
