"""One layer of a `SparseCache`: stores what transformers hands it and answers the layer's attention calls."""

from __future__ import annotations

import copy
import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.attention import decode
from sparseattn.budget import Budget
from sparseattn.cache import KVCache
from sparseattn.integrations.errors import ModelError
from sparseattn.integrations.routing import Call, delegate, not_held
from sparseattn.integrations.upstream import CacheLayerMixin
from sparseattn.selection import Selection


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


# Set while a prepared model runs. One per thread, so that passes of several models and threads do not mix.
RUNNING: ContextVar[Run | None] = ContextVar("sparseattn_running", default=None)


class SparseLayer(CacheLayerMixin):
    """The rows of one layer in a `KVCache`, with a selector.

    `update` only takes note of new keys and values: they are stored when the attention call brings the queries too.

    Args:
        rows: this layer's cache.
        budget: rows beyond sink and window, as in `decode`.
        impl: as in `attend`.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False  # shapes come with the first rows

    def __init__(self, rows: KVCache, budget: Budget, impl: str | None = None) -> None:
        super().__init__()
        self.rows, self.budget, self.impl = rows, budget, impl
        self.columns = 0  # tokens taken in, padding included
        self._given: Tensor | None = None
        self.forget_counts()

    def forget_counts(self) -> None:
        """Counts anew."""
        self.sparse_calls, self.dense_calls = 0, 0
        # Rows chosen, read anyway and stored, summed over sparse calls; a tensor on a GPU, for which no step waits.
        self._chosen: float | Tensor = 0.0
        self._always, self._stored = 0.0, 0.0
        self._read: float | Tensor = 0.0

    @property
    def mean_rows(self) -> float:
        """Rows attended by a query head in a sparse call, mean over calls, sequences and heads; 0 without any."""
        return (float(self._chosen) + self._always) / max(self.sparse_calls, 1)

    @property
    def mean_context(self) -> float:
        """Rows stored at a sparse call, mean over calls and sequences; 0 without any."""
        return self._stored / max(self.sparse_calls, 1)

    @property
    def bytes_share(self) -> float:
        """Bytes read to choose and to attend over bytes stored, mean over calls, sequences and KV heads; NaN without
        any, where the cache was made without `check`, and where the selector does not say what it reads."""
        return float(self._read) / self.sparse_calls if self.sparse_calls and self.rows.check else math.nan

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
            out = decode(query.select(3, t), self.rows, self.budget, scale=call.scale, impl=self.impl)
            parts.append(out.reshape(batch, 1, named, size))
            self._count()
        self.columns += new
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

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
        self.rows.append(keys, values, query, positions)

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
        # Stored rows lie without padding and perhaps in a selector's order. All of them are before the new ones, whose
        # part of the model's mask says what these see of each other.
        keys, values, real = self.rows.everything()
        group, stored = query.shape[2], keys.shape[2]
        block = self._block(call.mask, new, run).to(keys.device)  # [B,1,n,n]
        if bool(real.all()):
            seen = block.new_ones(1, 1, 1, stored)
        else:
            keys, values = (x.masked_fill(~real[..., None], 0.0) for x in (keys, values))
            alike = bool((real == real[:, :1]).all())
            seen = (real[:, :1] if alike else real.repeat_interleave(group, 1))[:, :, None]  # [B,1 or HG,1,N]
        sizes = [max(a, b) for a, b in zip(seen.shape[:2], block.shape[:2], strict=True)]
        mask = torch.cat([seen.expand(*sizes, new, -1), block.expand(*sizes, -1, -1)], -1)
        keys, values = (
            torch.cat([x, y[:, :, part]], 2) for x, y in zip((keys, values), (call.key, call.value), strict=True)
        )
        self._store(call, query, part, run)
        if keys.is_cuda:  # where a mask and grouped heads together leave only the kernel that stores all logits
            keys, values, group = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), 1
        out = F.scaled_dot_product_attention(
            call.query[:, :, part], keys, values, attn_mask=mask, scale=call.scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)

    def _block(self, mask: Any, new: int, run: Run) -> Tensor:
        """`[B,1,n,n]` bool: which of the `new` tokens each of them sees."""
        if isinstance(mask, Tensor) and mask.ndim == 4:
            block = mask[:, :, :new, self.columns : self.columns + new]
            return block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        block = torch.ones(new, new, dtype=torch.bool).tril()[None, None]
        return block if run.positions is None else block & (run.positions[:, None, None, :new] >= 0)

    def _count(self) -> None:
        chosen = self.rows.latest
        assert chosen is not None
        stored, sealed = (sum(rows) / len(rows) for rows in self.rows.counts)
        tail = self.rows.latest_tail
        for part in (chosen,) if tail is None else (chosen, tail.selection):
            read = part.length.sum()
            batch, heads, _ = part.length.shape
            self._chosen = self._chosen + (read if read.is_cuda else int(read)) / (batch * heads)
        self._always += stored - sealed  # sink and rows not sealed
        self._stored += stored
        self.sparse_calls += 1
        if self.rows.check:  # a comparison, which pays for looking
            self._read = self._read + self._share_read(chosen, stored, stored - sealed)

    def _share_read(self, chosen: Selection, stored: float, always: float) -> float | Tensor:
        """Bytes read to choose and to attend over bytes stored, mean over KV heads; NaN where the selector is silent.

        Query heads that choose apart read a row once that several of them chose.
        """
        if chosen.scan_bytes is None:
            return math.nan
        keys, tail = self.rows.sealed_keys, self.rows.latest_tail
        heads = keys.shape[1]
        distinct, more = chosen.distinct(heads, keys.shape[2]), chosen.scan_bytes + chosen.bias_bytes(heads)
        if tail is not None:
            distinct = distinct + tail.selection.distinct(heads, tail.keys.shape[2])
            more = more + tail.selection.bias_bytes(heads)
        row = 2 * keys.shape[3] * self.rows.selector.bytes_of(keys)  # bytes of a key and a value
        return (always + distinct.double().mean() + more.double().mean() / row) / stored

    def keep_unsealed(self, tokens: int) -> None:
        """From now on the newest `tokens` or more stay unsealed, so that they can be taken back."""
        self.rows.rollback = max(self.rows.rollback, tokens - self.rows.window)

    # -- what transformers asks of a layer -----------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first rows stored tell all."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes note of new rows `[B,H,n,D]` and returns them: the attention call finds the stored ones by itself."""
        if RUNNING.get() is None:
            raise RuntimeError(
                "the model of this SparseCache has its own attention back, which cannot read it: make a new one"
            )
        self._given, self.is_initialized = key_states, True
        return key_states, value_states

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
            self.rows.crop(drop)
            self.columns -= tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b becomes what sequence `beam_idx[b]` was."""
        if self.columns:
            self.rows.reorder(beam_idx.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        if self.columns:
            self.rows.reorder(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices`."""
        if self.columns:
            self.rows.reorder(torch.arange(self.rows.batch)[indices.cpu()])

    def reset(self) -> None:
        """Forgets every row; counts stay."""
        self.rows.reset()
        self.columns, self._given, self.is_initialized = 0, None, False

    def clone(self) -> SparseLayer:
        """An independent copy that counts anew."""
        twin = copy.copy(self)
        twin.rows = self.rows.clone()
        twin.forget_counts()
        return twin

    def __repr__(self) -> str:
        return f"SparseLayer({self.rows!r}, budget={self.budget!r})"
