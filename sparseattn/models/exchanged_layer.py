"""A layer of a model with an index of its own, in which a selector chooses instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.cache.listed_rows import ListedLatents
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.models.attention_routing import Call
from sparseattn.models.index_keys import KeepsIndex
from sparseattn.models.native_choice import PASSED, passed
from sparseattn.models.sparse_heads import SparseHeads
from sparseattn.models.sparse_layer import Run, SparseLayer


class ExchangedLayer(KeepsIndex):
    """A sparse layer whose model's index goes on choosing, and whose choice nobody follows.

    Prompts are prefilled densely, as in every model: the choice is applied neither there nor in decoding. Values that
    are narrower than keys (MLA) are stored with zeros behind them.
    """

    def attend(self, call: Call, run: Run) -> Tensor:
        mask = call.mask if passed(call.options) else self._without_choice(call, run)
        options = {name: value for name, value in call.options.items() if name not in PASSED}
        size = call.value.shape[-1]
        values = F.pad(call.value, (0, call.key.shape[-1] - size)) if size < call.key.shape[-1] else call.value
        return super().attend(replace(call, value=values, mask=mask, options=options), run)[..., :size]

    def _without_choice(self, call: Call, run: Run) -> Tensor | None:
        """Return the mask of a layer that folds its choice into it, as it was before; None behind stored rows, which
        every new token sees."""
        if self.columns:
            return None
        seen = self._block(None, call.query.shape[2], run).to(call.query.device)
        if run.original != "eager":
            return seen
        least = torch.finfo(call.query.dtype).min
        return torch.zeros(seen.shape, dtype=call.query.dtype, device=seen.device).masked_fill(~seen, least)


class ExpandedLayer(ExchangedLayer):
    """Such a layer of a model that keeps latents (MLA): keys and values of every head are kept instead.

    A new token's latent is expanded by the model once and never again.

    Attributes:
        latents: what the model gave it, for a `LatentLayer` to go on from.
    """

    def __init__(self, parts: Sequence[SparseHeads], impl: str | None = None) -> None:
        super().__init__(parts, impl)
        self.latents = ListedLatents()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = super().update(key_states, value_states)
        self.latents.shorten(self.columns)
        self.latents.append(torch.cat(given, -1)[:, 0])
        return given

    def _buffers(self) -> dict[str, RowBuffer]:
        return {**super()._buffers(), **self.latents.buffers()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.columns:
            super().reorder_cache(beam_idx)
            self.latents.take(beam_idx.long())

    def reset(self) -> None:
        super().reset()
        self.latents.reset()

    def append_from(self, other: SparseLayer) -> None:
        super().append_from(other)
        if isinstance(other, ExpandedLayer):
            self.latents = other.latents.clone()

    def clone(self) -> ExpandedLayer:
        twin = super().clone()
        assert isinstance(twin, ExpandedLayer)
        twin.latents = self.latents.clone()
        return twin

    def _given(self, call: Call) -> bool:
        return self.unattended is not None  # what `update` was given are latents
