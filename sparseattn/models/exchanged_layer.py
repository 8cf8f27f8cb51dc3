"""A layer of a model with an index of its own, in which a selector chooses instead."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.models.attention_routing import Call
from sparseattn.models.index_keys import KeepsIndex
from sparseattn.models.native_choice import PASSED, passed
from sparseattn.models.sparse_layer import Run


class ExchangedLayer(KeepsIndex):
    """A sparse layer whose model's index goes on choosing, and whose choice nobody follows.

    Prompts are prefilled densely, as in every model: the choice is applied neither there nor in decoding.
    """

    def attend(self, call: Call, run: Run) -> Tensor:
        mask = call.mask if passed(call.options) else self._without_choice(call, run)
        options = {name: value for name, value in call.options.items() if name not in PASSED}
        return super().attend(replace(call, mask=mask, options=options), run)

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

    A new token's latent is expanded by the model once and never again. Values that are narrower than keys are stored
    with zeros behind them.
    """

    def _given(self, call: Call) -> bool:
        return self.unattended is not None  # what `update` was given are latents

    def attend(self, call: Call, run: Run) -> Tensor:
        size = call.value.shape[-1]
        padded = F.pad(call.value, (0, call.key.shape[-1] - size))
        return super().attend(replace(call, value=padded), run)[..., :size]
