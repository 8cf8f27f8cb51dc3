"""One layer of a `SparseCache`: it stores the rows that transformers hands it and answers the attention calls."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.cache.all_rows import copy_rows, everything
from sparseattn.cache.attend_stored import in_place, sums_seen, with_new_rows
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.activity import LayerActivity
from sparseattn.models.attention_routing import Call, beyond_softmax, delegate
from sparseattn.models.errors import ModelError
from sparseattn.models.sparse_heads import SparseHeads
from sparseattn.models.transformers_classes import CacheLayerMixin
from sparseattn.roles.role import together


@dataclass(frozen=True, eq=False)
class Run:
    """What the layers need to know of the forward pass in progress.

    Args:
        cache: the `SparseCache` that the pass runs with.
        original: name of the model's own attention implementation.
        sparse_tokens: how many of the pass's last tokens are decoded sparsely, one by one.
        positions: `[B,n]` int64 on the CPU, negative for padding; None: no padding, counting on from the newest row.
    """

    cache: Any
    original: str
    sparse_tokens: int
    positions: Tensor | None


# Set while a prepared model runs, by the frame around its forward. Each thread has one of its own, so that passes of
# several models and threads do not mix.
RUNNING: ContextVar[Run | None] = ContextVar("sparseattn_running", default=None)


def another_dtype(stored: torch.dtype, new: torch.dtype) -> str:
    """Return the sentence that refuses rows of a model whose dtype has changed since the first rows came."""
    return (
        f"this SparseCache holds keys and values in {_short(stored)}, and the model now makes them in {_short(new)} "
        f"(model.to): make a new SparseCache, or go back with model.to({stored})"
    )


def _autocast_problem(keys: Tensor, values: Tensor) -> str | None:
    """Return the sentence that refuses keys and values to which autocast has given two dtypes, or None."""
    kind = keys.device.type
    if keys.dtype == values.dtype or not torch.is_autocast_enabled(kind):
        return None
    return (
        f"autocast gives keys and values of two dtypes, {_short(keys.dtype)} and {_short(values.dtype)}: load the "
        f"model in {_short(torch.get_autocast_dtype(kind))}, or leave autocast"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SparseLayer(CacheLayerMixin):
    """The rows of one layer, in a `KVCache` for each method that its KV heads have.

    `update` only takes note of new keys and values. They are stored when the attention call brings the queries too.

    Args:
        parts: this layer's caches; each KV head is in one.
        impl: as in `attend`.

    Attributes:
        columns: tokens taken in, padding included.
        unattended: keys that `update` was given and that no attention call has dealt with; None in a whole layer.
        prepared: the preparation of the model whose passes it serves; None in a layer of no cache.
        dense_seconds: what dense attention has taken, by a clock that does not wait for a GPU.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False  # shapes come with the first rows

    def __init__(self, parts: Sequence[SparseHeads], impl: str | None = None) -> None:
        super().__init__()
        self.parts, self.impl = tuple(parts), impl
        self.columns = 0
        self.unattended: Tensor | None = None
        self.prepared: Any = None
        self.dense_seconds = 0.0
        self.forget_counts()

    @property
    def rows(self) -> KVCache:
        """The cache of a layer whose heads have one method; ValueError where they have several."""
        if len(self.parts) > 1:
            raise ValueError(f"the heads of this layer have {len(self.parts)} methods, each with a cache in `parts`")
        return self.parts[0].rows

    @property
    def label(self) -> str:
        """The method, or each method with the number of its KV heads."""
        if len(self.parts) == 1:
            return self.parts[0].share.label
        named = ((part.share.label, part.share.heads) for part in self.parts)
        return ", ".join(f"{label} ({len(heads.which)} of {heads.of} heads)" for label, heads in named if heads)

    def forget_counts(self) -> None:
        """Start counting anew."""
        self.sparse_calls, self.dense_calls = 0, 0
        for part in self.parts:
            part.forget_counts()

    def activity(self) -> LayerActivity:
        """Return what this layer did; of one whose heads have several methods, rows are the mean over its heads."""
        parts = [part.activity() for part in self.parts]
        whole = sum(parts, LayerActivity(dense_steps=self.dense_calls))
        first = parts[0]
        read = self._mean(lambda part: part.activity().rows_read)
        return replace(whole, sparse_steps=first.sparse_steps, rows_read=round(read), rows_held=first.rows_held)

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
        """Bytes read to choose and to attend, over bytes stored; mean over calls, sequences and KV heads.

        NaN without any call, where the caches were made without `check`, and where a selector does not say what it
        reads.
        """
        return self._mean(lambda part: part.bytes_share)

    def _mean(self, number: Callable[[SparseHeads], float]) -> float:
        """Return the mean over KV heads."""
        weights = [1 if part.share.heads is None else len(part.share.heads.which) for part in self.parts]
        return sum(w * number(part) for w, part in zip(weights, self.parts, strict=True)) / sum(weights)

    # -- attention ---------------------------------------------------------------------------------------------------

    def attend(self, call: Call, run: Run) -> Tensor:
        """Store the call's n new rows and return the attention output `[B,n,HG,D]`.

        The first n - `run.sparse_tokens` tokens attend densely, the others one by one over what the selector chooses.

        Raises:
            ModelError: the call does what sparse attention does not compute.
        """
        self._check(call)
        batch, query_heads, new, head_dim = call.query.shape
        query = call.query.view(batch, call.key.shape[1], -1, new, head_dim)  # [B,H,G,n,D]
        dense, scale = new - run.sparse_tokens, call.scale
        outs = []
        if dense:
            started = time.perf_counter()
            outs.append(self._attend_densely(call, query, dense, run))
            self.dense_seconds += time.perf_counter() - started
            self.dense_calls += 1
            for part in self.parts:
                part.rows.deal()
        for t in range(dense, new):
            self._store(call, query, t, t + 1, run)
            run.cache.board.step = t
            real = None if run.positions is None else run.positions[:, t] >= 0
            heads = [part.decode(query.select(3, t), scale, self.impl, real) for part in self.parts]
            out = heads[0] if len(heads) == 1 else self._joined(heads)
            outs.append(out.reshape(batch, 1, query_heads, head_dim))
            self.sparse_calls += 1
        self.columns += new
        self.unattended = None
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _joined(self, heads: Sequence[Tensor]) -> Tensor:
        """Return the parts' outputs, each `[B,h,...]`, as `[B,H,...]`."""
        return together([part.share for part in self.parts], heads)

    def _check(self, call: Call) -> None:
        if not self._given(call):
            raise ModelError(
                f"layer {call.layer} attends to other keys than it gave to the cache, so they cannot be selected: "
                f"make it dense with dense_layers"
            )
        if (beyond := self._beyond(call)) is not None:
            problem = f"layer {call.layer} {beyond}, which sparse attention does not compute: make it dense"
        elif call.options.get("dropout"):
            problem = f"layer {call.layer} drops attention weights: put the model in eval() mode"
        elif torch.is_grad_enabled() and call.query.requires_grad:
            problem = "sparse attention has no gradients: run the model under torch.no_grad()"
        else:
            return
        self.unattended = None  # nothing is stored, so the layer is whole
        raise ModelError(problem)

    def _given(self, call: Call) -> bool:
        """Whether a call attends to the keys that `update` was given."""
        return call.key is self.unattended

    def _beyond(self, call: Call) -> str | None:
        """Return what a call does that this layer does not compute, in words, or None."""
        return beyond_softmax(call)

    def _store(self, call: Call, query: Tensor, start: int, stop: int, run: Run) -> None:
        """Store the rows of the call's tokens `start` to `stop`; `query` is `[B,H,G,n,D]` of all of them."""
        keys, values, positions = call.key, call.value, run.positions
        if stop - start < keys.shape[2]:
            part = slice(start, stop)
            keys, values, query = keys[:, :, part], values[:, :, part], query[:, :, :, part]
            positions = None if positions is None else positions[:, part]
        try:
            for heads in self.parts:
                heads.append(keys, values, query, positions)
        except ValueError as error:
            if (problem := _autocast_problem(keys, values)) is not None:
                raise ModelError(problem) from error
            raise

    def _attend_densely(self, call: Call, query: Tensor, new: int, run: Run) -> Tensor:
        """Store the first `new` tokens of the call and return `[B,new,HG,D]`, each over all rows up to its own."""
        part = slice(0, new)
        if not self.columns:  # nothing is stored: the model's own attention, over what the call itself brings
            self._store(call, query, 0, new, run)
            if new < call.query.shape[2]:
                mask = call.mask
                if mask is not None:
                    mask = mask[..., part] if mask.ndim == 2 else mask[..., part, part]
                queries, keys, values = (x[:, :, part] for x in (call.query, call.key, call.value))
                call = Call(call.module, queries, keys, values, mask, call.options)
            return delegate(call, run.original)[0]
        block = self._block(call.mask, new, run).to(call.key.device)  # [B,1,n,n]
        outs = [self._attend_stored(heads, call, new, block, run) for heads in self.parts]  # each [B,h,G,n,D]
        self._store(call, query, 0, new, run)
        return self._joined(outs).flatten(1, 2).transpose(1, 2)

    def _attend_stored(self, heads: SparseHeads, call: Call, new: int, block: Tensor, run: Run) -> Tensor:
        """Return `[B,h,G,n,D]` of a part's heads: the first `new` tokens over what it holds and over each other.

        Stored rows lie without padding and perhaps in a selector's order. All of them are before the new ones. `block`,
        the part of the model's mask that is of the new tokens, says what these see of each other.
        """
        part, num_kv_heads, followed = slice(0, new), call.key.shape[1], heads.rows.search.tokens_followed
        group = call.query.shape[1] // num_kv_heads
        if in_place(heads.rows, group * new):
            query = heads.of_queries(call.query, num_kv_heads)[:, :, part].unflatten(1, (-1, group))
            mine = heads.of(call.key)[:, :, part], heads.of(call.value)[:, :, part]
            out, total = with_new_rows(query, heads.rows, mine, block, scale=call.scale, impl=self.impl)
            if followed:
                self._checked(heads, query, total, new, run)
            return out
        keys, values, valid = everything(heads.rows)
        stored, count = keys.shape[2], keys.shape[1]
        block = heads.of_queries(block, num_kv_heads)
        if bool(valid.all()):
            seen = block.new_ones(1, 1, 1, stored)
        else:
            keys, values = (x.masked_fill(~valid[..., None], 0.0) for x in (keys, values))
            alike = bool((valid == valid[:, :1]).all())
            seen = (valid[:, :1] if alike else valid.repeat_interleave(group, 1))[:, :, None]  # [B,1 or hG,1,N]
        sizes = [max(a, b) for a, b in zip(seen.shape[:2], block.shape[:2], strict=True)]
        mask = torch.cat([seen.expand(*sizes, new, -1), block.expand(*sizes, -1, -1)], -1)
        keys, values = (
            torch.cat([x, heads.of(y)[:, :, part]], 2)
            for x, y in zip((keys, values), (call.key, call.value), strict=True)
        )
        grouped, query = group > 1, heads.of_queries(call.query, num_kv_heads)[:, :, part]
        if followed:
            asked = query[:, :, -followed:].unflatten(1, (count, group))  # [B,h,G,m,D]
            total = sums_seen(asked, keys, mask[:, :, -followed:], scale=call.scale)
            self._checked(heads, asked, total, new, run)
        if keys.is_cuda:  # where a mask and grouped heads together leave only the kernel that stores all logits
            keys, values, grouped = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), False
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=call.scale, enable_gqa=grouped)
        return out.unflatten(1, (count, group))

    def _checked(self, heads: SparseHeads, queries: Tensor, total: Tensor, new: int, run: Run) -> None:
        """Tell a part's selector of a dense pass: queries `[B,h,G,m,D]` of its newest tokens, and what these sum to."""
        if run.positions is not None:
            real = (run.positions[:, new - total.shape[3] : new] >= 0).to(total.device)
            total = total.masked_fill(~real[:, None, None], torch.inf)
        heads.rows.search.checked(queries, total)

    def _block(self, mask: Any, new: int, run: Run) -> Tensor:
        """Return `[B,1,n,n]` bool: which of the `new` tokens each of them sees."""
        if isinstance(mask, Tensor) and mask.ndim == 4:
            block = mask[:, :, :new, self.columns : self.columns + new]
            return block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        block = torch.ones(new, new, dtype=torch.bool).tril()[None, None]
        return block if run.positions is None else block & (run.positions[:, None, None, :new] >= 0)

    def keep_unsealed(self, tokens: int) -> None:
        """Keep the newest `tokens` or more unsealed from now on, so that they can be taken back."""
        for part in self.parts:
            part.rows.rollback = max(part.rows.rollback, tokens - part.rows.window)

    # -- what transformers asks of a layer -----------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the dtype and the device of the first rows, which all later ones have."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take note of new rows `[B,H,n,D]` and return them; the attention call finds the stored ones by itself.

        Raises:
            RuntimeError: it is called outside a pass of the prepared model, or earlier rows were never attended.
            ValueError: the rows have another dtype than those that are stored.
        """
        run = RUNNING.get()
        if run is None or run.cache.prepared.undone:
            if run is None and self.prepared is not None and not self.prepared.undone:
                raise RuntimeError(
                    "update() is called by a pass of the model that this SparseCache was made for, and none is in "
                    "progress: run the model with the cache"
                )
            raise RuntimeError(
                "the model of this SparseCache has its own attention back, which cannot read it: make a new one"
            )
        if self.unattended is not None:
            raise RuntimeError(
                "this layer is given new rows, and those it was given before were never attended to, as the pass that "
                "brought them was cut short or went past sparse attention: take the cache back with crop(0), or make "
                "a new one"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif key_states.dtype != self.dtype:
            raise ValueError(another_dtype(self.dtype, key_states.dtype))
        self.unattended = key_states
        return key_states, value_states

    def offload(self) -> None:
        """Leave rows in host memory where they are.

        Raises:
            RuntimeError: they are on another device, where `sealed_device` alone says which stay.
        """
        if self.is_initialized and self.device.type != "cpu":
            raise RuntimeError(
                f"the rows of a SparseCache on {self.device} are not offloaded: sealed_device='cpu' keeps sealed ones "
                f"in host memory"
            )

    def prefetch(self) -> None:
        """Do nothing, as no row is offloaded."""

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return (columns of the mask, 0). Before transformers 5.4 or so the argument is the new tokens' positions."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.columns + new, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens taken in, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older releases

    def check_crop(self, tokens: int, drop: Tensor) -> None:
        """Raise what `crop_rows` would, and change nothing."""
        if tokens:
            for part in self.parts:
                part.rows.check_crop(drop)

    def crop_rows(self, tokens: int, drop: Tensor) -> None:
        """Forget the newest `tokens`, which are `drop` `[B]` rows of each sequence."""
        if tokens:
            for part in self.parts:
                part.rows.crop(drop)
            self.columns -= tokens

    def take_back(self, tokens: int, counts: Tensor) -> None:
        """Go back to `tokens`, which are `counts` `[B]` rows of each sequence, from a pass that was cut short.

        Raises:
            ValueError: some of the rows that would go are sealed.
            RuntimeError: the pass was cut short while rows were stored or sealed, so that these are void.
        """
        for part in self.parts:
            part.rows.crop(part.rows.lengths - counts)
        self.columns, self.unattended = tokens, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b become what sequence `beam_idx[b]` was."""
        if self.columns:
            for part in self.parts:
                part.rows.reorder(beam_idx.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        if self.columns:
            self.reorder_cache(self._sequences().repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`."""
        if self.columns:
            self.reorder_cache(self._sequences()[indices.cpu()])

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        return len(self._sequences())

    def _sequences(self) -> Tensor:
        return torch.arange(self.parts[0].rows.batch)

    def reset(self) -> None:
        """Forget every row; the counts of calls stay."""
        for part in self.parts:
            part.rows.reset()
        self.columns, self.unattended, self.is_initialized = 0, None, False

    def append_from(self, other: SparseLayer) -> None:
        """Store the rows of a layer whose heads have one method, which has sealed none of them."""
        for part in self.parts:
            copy_rows(other.rows, part.rows, part.of)
        self.columns, self.dtype, self.device, self.is_initialized = other.columns, other.dtype, other.device, True

    def clone(self) -> SparseLayer:
        """Return an independent copy that counts anew."""
        twin = copy.copy(self)
        twin.parts = tuple(part.clone() for part in self.parts)
        twin.forget_counts()
        return twin

    def __repr__(self) -> str:
        return f"SparseLayer({'; '.join(map(repr, self.parts))})"
