"""A layer that reads, when it decodes, the rows that the model's own index chose, and those alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.cache.listed_rows import Listed, ListedLatents, ListedRows
from sparseattn.core.activity import LayerActivity
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.models.attention_layers import AttentionLayer
from sparseattn.models.attention_routing import Call, beyond_softmax, delegate, name_of
from sparseattn.models.cache_argument import installed
from sparseattn.models.errors import ModelError
from sparseattn.models.exchanged_layer import ExchangedLayer, ExpandedLayer
from sparseattn.models.index_keys import KeepsIndex
from sparseattn.models.native_choice import NativeChoice, check_lists, choice_of
from sparseattn.models.native_index import projections
from sparseattn.models.sparse_layer import RUNNING, Run, SparseLayer


class NativeLayer(KeepsIndex):
    """Keys and values of a layer whose model chooses among them; stored with padding, as the choice counts columns.

    Prompts are prefilled by the model's own attention with the mask of its choice, so that all outputs are the model's.

    Args:
        heads: KV heads.
        capacity: rows to allocate at once.
        impl: as in `attend`.
    """

    def __init__(self, heads: int, capacity: int = 0, impl: str | None = None) -> None:
        self.heads = heads
        self.stored: Listed = self._storage(capacity)
        super().__init__((), impl, capacity)

    def _storage(self, capacity: int) -> Listed:
        return ListedRows(capacity)

    # -- a pass --------------------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new rows and return all that the pass attends to."""
        super().update(key_states, value_states)
        self.stored.shorten(self.columns)  # a pass that was cut short has left some
        keys, values = self._append(key_states, value_states)
        self.unattended = keys
        return keys, values

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.stored, ListedRows)
        return self.stored.append(keys, values)

    def attend(self, call: Call, run: Run) -> Tensor:
        """Return the attention output `[B,n,HG,D]` over what the index chose.

        Raises:
            ModelError: the call does what sparse attention does not compute, or its choice cannot be read.
        """
        self._check(call)
        new = call.query.shape[2]
        choice = choice_of(
            call.module, call.options, call.mask, new, self.columns + new, padded=run.positions is not None
        )
        check_lists(call.layer, choice.lists, self.heads)
        if run.sparse_tokens < new:
            out = delegate(call, run.original)[0]
            self.dense_calls += 1
        else:
            real = None if run.positions is None else run.positions >= 0
            out = torch.stack([self._decode(call, choice, t, real) for t in range(new)], 1)
            self.sparse_calls += new
        self.columns += new
        self.unattended = None
        return out

    def _decode(self, call: Call, choice: NativeChoice, token: int, real: Tensor | None) -> Tensor:
        """Return `[B,HG,D]` of a token, and count what it read."""
        batch, _, _, size = call.query.shape
        selection = choice.selection(token, self.heads)
        self._count(selection.attended, token, real)
        return self._read(call.query[:, :, token].view(batch, self.heads, -1, size), selection, call.scale)

    def _read(self, query: Tensor, selection: Selection, scale: float) -> Tensor:
        assert isinstance(self.stored, ListedRows)
        return self.stored.attend(query, selection, scale, self.impl).flatten(1, 2)

    # -- what it read --------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return "native"

    def forget_counts(self) -> None:
        super().forget_counts()
        self._steps, self._held = 0, 0
        self._rows = 0.0

    def _count(self, rows: Tensor, token: int, real: Tensor | None) -> None:
        """Count the rows `[B,Hs]` that a token read."""
        counted = len(rows) if real is None else int(real[:, token].sum())
        read = rows.double().mean(1)
        self._rows += float(read.sum() if real is None else (read * real[:, token].to(read.device)).sum())
        self._steps += counted
        self._held += counted * (self.columns + token + 1)

    @property
    def mean_rows(self) -> float:
        return self._rows / max(self._steps, 1)

    @property
    def mean_context(self) -> float:
        return self._held / max(self._steps, 1)

    @property
    def bytes_share(self) -> float:
        """NaN: what the model's own index reads is not counted."""
        return float("nan")

    def activity(self) -> LayerActivity:
        counts = {"sparse_steps": self._steps, "rows_read": round(self._rows), "rows_held": self._held}
        bytes_held = self._held * self.stored.row_bytes
        read = None if self._steps else 0
        return LayerActivity(dense_steps=self.dense_calls, bytes_read=read, bytes_held=bytes_held, **counts)

    # -- what transformers asks of a layer -----------------------------------------------------------------------------

    def _buffers(self) -> dict[str, RowBuffer]:
        return {**super()._buffers(), **self.stored.buffers()}

    def keep(self, tensors: Mapping[str, Tensor], columns: int, device: torch.device) -> None:
        super().keep(tensors, columns, device)
        rows = next(iter(self.stored.buffers().values())).data
        self.lazy_initialization(rows, rows)

    def crop_rows(self, tokens: int, drop: Tensor) -> None:
        super().crop_rows(tokens, drop)
        self.stored.shorten(self.columns)

    def take_back(self, tokens: int, counts: Tensor) -> None:
        super().take_back(tokens, counts)
        self.stored.shorten(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.columns:
            super().reorder_cache(beam_idx)
            self.stored.take(beam_idx.long())

    def _sequences(self) -> Tensor:
        first = next(iter(self.stored.buffers().values()))
        return torch.arange(len(first.full))

    def reset(self) -> None:
        super().reset()
        self.stored.reset()

    def append_from(self, other: SparseLayer) -> None:
        """Take over the rows and the index of a layer that a prompt was prefilled in densely, for a selector.

        Raises:
            ValueError: another layer, or rows among which there is padding.
        """
        self._take_rows(other)
        super().append_from(other)

    def _take_rows(self, other: SparseLayer) -> None:
        if not isinstance(other, ExchangedLayer):
            raise ValueError(f"a native layer goes on from a layer of the same model, got {other!r}")
        rows = other.rows
        if rows.lengths.tolist() != [other.columns] * rows.batch:
            raise ValueError("native=True goes on from a prompt that was prefilled without padding")
        assert isinstance(self.stored, ListedRows)
        self.stored.append(rows.keys, rows.values)

    def clone(self) -> NativeLayer:
        twin = super().clone()
        assert isinstance(twin, NativeLayer)
        twin.stored = self.stored.clone()
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.columns} tokens"


class LatentLayer(NativeLayer):
    """Latents of a layer of MLA whose model chooses among them.

    A token that is decoded is projected into the latents' space, so that the latents of the rows chosen are all that it
    reads: keys and values are expanded for prompts alone.
    """

    def _storage(self, capacity: int) -> Listed:
        return ListedLatents(capacity)

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store latents `[B,1,n,R]` and shared keys after RoPE `[B,1,n,K]`; return all of them, or where every token
        is decoded, the new ones, which are expanded for nothing."""
        assert isinstance(self.stored, ListedLatents)
        stored = self.stored.append(torch.cat([keys, values], -1)[:, 0])[:, None]
        run = RUNNING.get()
        if run is not None and run.sparse_tokens == keys.shape[2]:
            return keys, values
        return stored[..., : keys.shape[3]], stored[..., keys.shape[3] :]

    def _take_rows(self, other: SparseLayer) -> None:
        if not isinstance(other, ExpandedLayer):
            raise ValueError(f"a native layer goes on from a layer of the same model, got {other!r}")
        self.stored = other.latents.clone()

    def _given(self, call: Call) -> bool:
        return self.unattended is not None

    def _beyond(self, call: Call) -> str | None:
        options = {name: value for name, value in call.options.items() if name != "s_aux"}
        return beyond_softmax(replace(call, options=options))

    def _decode(self, call: Call, choice: NativeChoice, token: int, real: Tensor | None) -> Tensor:
        assert isinstance(self.stored, ListedLatents)
        module: Any = call.module
        to_keys, to_values = projections(module)
        rows = choice.listed(token)[:, 0]  # [B,S]
        self._count((rows >= 0).sum(-1, keepdim=True), token, real)
        plain, turned = call.query[:, :, token].split([to_keys.shape[1], module.qk_rope_head_dim], -1)
        query = torch.cat([torch.einsum("bhk,hkr->bhr", plain, to_keys), turned], -1)
        out = self.stored.attend(query, rows, module.kv_lora_rank, call.scale, call.options.get("s_aux"))
        return torch.einsum("bhr,hvr->bhv", out, to_values)


def native_layers(
    model: Any, attention: Mapping[int, AttentionLayer], dense: Sequence[int], capacity: int, impl: str | None
) -> dict[int, NativeLayer]:
    """Return a layer for each of the model's that has an index of its own and is not in `dense`.

    Raises:
        ModelError: there is none, or one that cannot be followed.
        ValueError, RuntimeError: an `impl` that cannot attend to a layer's rows.
    """
    indexed = {i: what.index for i, what in attention.items() if what.index is not None}
    if not indexed:
        raise ModelError(
            f"{name_of(model)} has no layer with an index of its own that chooses among its rows, which native=True "
            f"follows: name a selector instead"
        )
    made = {}
    for i, index in indexed.items():
        if i in dense:
            continue
        if index.unreadable is not None:
            raise ModelError(
                f"layer {i} of {name_of(model)} has an index that cannot be followed with {installed()}, as "
                f"{index.unreadable}: use the model without native=True"
            )
        if not index.latent and (beyond := attention[i].beyond) is not None:
            raise ModelError(
                f"layer {i} of {name_of(model)} {beyond}, which sparse attention does not compute: name such layers in "
                f"dense_layers"
            )
        made[i] = (LatentLayer if index.latent else NativeLayer)(attention[i].heads, capacity, impl)
        _check_impl(made[i], i, attention[i])
    return made


def _check_impl(layer: NativeLayer, number: int, what: AttentionLayer) -> None:
    try:
        layer.stored.check_impl(layer.impl, what.device, what.dtype)
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"layer {number}: {error}") from error
