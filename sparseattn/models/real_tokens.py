"""Which tokens of a batch are real, where some are padding, and at which positions they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.models.errors import ModelError


class RealTokens:
    """The tokens that a cache has taken in. Nothing is kept while none was padding.

    Attributes:
        real: `[B,columns]` bool on the CPU, once a token was padding; else None.
    """

    def __init__(self) -> None:
        self.real: Tensor | None = None
        self._before: Tensor | None = None  # what that was before the pass in progress

    def clone(self) -> RealTokens:
        """Return an independent copy."""
        twin = RealTokens()
        twin.real, twin._before = self.real, self._before  # replaced, never changed in place
        return twin

    def begin(self) -> None:
        """Note that a pass begins, which `cut_short` undoes."""
        self._before = self.real

    def cut_short(self) -> None:
        """Go back to before the pass in progress."""
        self.real = self._before

    def take_in(self, mask: Any, held: int, batch: int, new: int) -> Tensor | None:
        """Take `new` tokens of `batch` sequences in, behind `held` ones.

        Args:
            mask: the model's attention_mask, `[B,T]` over all tokens; None: no padding.

        Returns:
            `[B,n]` bool, which new tokens are valid; None while no token ever was padding.

        Raises:
            ModelError: another mask.
        """
        real = torch.ones(batch, new, dtype=torch.bool)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < held + new:
                shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise ModelError(
                    f"sparse attention takes an attention_mask [B,T] over all {held + new} tokens, got {shape}"
                )
            real = mask[:, held : held + new].to("cpu", torch.bool)
        if self.real is None and bool(real.all()):
            return None
        before = torch.ones(batch, held, dtype=torch.bool) if self.real is None else self.real[:, :held]
        self.real = torch.cat([before, real], 1)
        return real

    def count(self, first: int, last: int) -> Tensor:
        """Return how many of the columns from `first` up to `last` are real: `[B]`, or one number for all sequences."""
        return torch.tensor(last - first) if self.real is None else self.real[:, first:last].sum(1)

    def crop(self, columns: int) -> None:
        """Forget all but the first `columns`."""
        self.real = None if self.real is None else self.real[:, :columns]

    def take(self, index: Tensor) -> None:
        """Let sequence b become what sequence `index[b]` was."""
        self.real = None if self.real is None else self.real[index.cpu()]

    def repeat(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self.real = None if self.real is None else self.real.repeat_interleave(repeats, 0)


def positions_of(given: Tensor | None, real: Tensor | None, held: int, batch: int, new: int) -> Tensor | None:
    """Return the positions of `new` tokens of `batch` sequences behind `held` ones, negative for padding.

    Args:
        given: the model's position_ids, `[B,n]` or `[1,n]`; None: they count on.
        real: what `RealTokens.take_in` returned.

    Returns:
        `[B,n]` int64 on the CPU; None: no padding, counting on.

    Raises:
        ModelError: position_ids of another shape.
    """
    if given is not None and given.ndim != 2:
        raise ModelError(f"position_ids are [B,n], one position for a token, got {list(given.shape)}")
    counted = torch.arange(held, held + new)[None]
    at = (counted if given is None else given.to("cpu", torch.int64)).expand(batch, -1)
    if real is not None:
        return at.masked_fill(~real, -1)
    return None if torch.equal(at, counted.expand_as(at)) else at
