"""A layer of a model with an index of its own, in which a selector chooses instead."""

from __future__ import annotations

from dataclasses import replace

import torch
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
