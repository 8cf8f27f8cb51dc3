"""Which tokens of a batch are real, where some are padding, and at which positions they are."""

from __future__ import annotations

from collections.abc import Mapping
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

    def take_in(self, mask: Any, position_ids: Tensor | None, stored: int, batch: int, new: int) -> Tensor | None:
        """Take `new` tokens of `batch` sequences in, behind `stored` ones.

        Args:
            mask: the model's attention_mask, `[B,T]` over all tokens; None: no padding.
            position_ids: of the model, `[B,n]` or `[1,n]`; None: they count on.

        Returns:
            `[B,n]` int64 on the CPU, the positions of the new tokens, negative for padding; None: no padding, and they
            count on.

        Raises:
            ModelError: another mask, or one that says something else of the stored tokens than when they came;
                position_ids of another shape, or positions that the stored tokens have.
        """
        if position_ids is not None and position_ids.ndim != 2:
            raise ModelError(f"position_ids are [B,n], one position for a token, got {list(position_ids.shape)}")
        real = torch.ones(batch, new, dtype=torch.bool)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < stored + new:
                shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                if position_ids is not None and isinstance(mask, Tensor) and mask.ndim == 2:
                    _check_given(mask.shape[1], stored, new)
                raise ModelError(
                    f"sparse attention takes an attention_mask [B,T] over all {stored + new} tokens, got {shape}"
                )
            told = mask[:, : stored + new].to("cpu", torch.bool)
            if len(told) not in (1, batch):
                raise ModelError(f"the attention_mask is of {len(told)} sequences, and {batch} are given")
            told = told.expand(batch, -1)
            self._check_held(told[:, :stored])
            real = told[:, stored:]
        elif self.real is not None:
            self._check_held(torch.ones(batch, stored, dtype=torch.bool))
        counted = torch.arange(stored, stored + new)[None]
        at = (counted if position_ids is None else position_ids.to("cpu", torch.int64)).expand(batch, -1)
        if self.real is None and bool(real.all()):
            if torch.equal(at, counted.expand_as(at)):
                return None
            _check_behind(at, stored)
            return at
        before = torch.ones(batch, stored, dtype=torch.bool) if self.real is None else self.real[:, :stored]
        self.real = torch.cat([before, real], 1)
        return at.masked_fill(~real, -1)

    def _check_held(self, told: Tensor) -> None:
        """Check that a mask `[B,stored]` tells of stored tokens what it told when they came, else ModelError."""
        stored = told.shape[1]
        if bool(told.all()) if self.real is None else torch.equal(told, self.real[:, :stored]):
            return
        held = torch.ones_like(told) if self.real is None else self.real[:, :stored]
        changes = [f"hides {n} that came as real" if (n := int((held & ~told).sum())) else ""]
        changes.append(f"shows {n} that came as padding" if (n := int((told & ~held).sum())) else "")
        raise ModelError(
            f"this cache holds {stored} tokens, of which the attention_mask {' and '.join(filter(None, changes))}: "
            f"they stay what they were, as the cache's `real` tells. Give that as their mask, or reset() the cache and "
            f"give all tokens anew"
        )

    def count(self, first: int, last: int) -> Tensor:
        """Return how many of the columns from `first` up to `last` are real: `[B]`, or one number for all sequences."""
        return torch.tensor(last - first) if self.real is None else self.real[:, first:last].sum(1)

    def crop(self, columns: int) -> None:
        """Forget all but the first `columns`."""
        self.real = None if self.real is None else self.real[:, :columns]

    def hide(self, newest: Tensor, columns: int) -> None:
        """Count the newest `newest` `[B]` of so many columns as padding, in each sequence."""
        if self.real is None:
            self.real = torch.ones(len(newest), columns, dtype=torch.bool)
        self.real = self.real & (torch.arange(columns) < columns - newest[:, None])

    def take(self, index: Tensor) -> None:
        """Let sequence b become what sequence `index[b]` was."""
        self.real = None if self.real is None else self.real[index.cpu()]

    def repeat(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self.real = None if self.real is None else self.real.repeat_interleave(repeats, 0)


def check_generated(inputs: Mapping[str, Any], stored: int, new: int, logits: int) -> None:
    """Raise what `generate` would come upon behind this pass of several tokens, or of none.

    Args:
        inputs: keyword arguments of the model's inner part.
        stored: tokens that are held.
        new: tokens of the pass.
        logits: how many of the last tokens the model returns logits of; 0: all. `generate` asks for 1.

    Raises:
        ModelError: no token is left of what it was given, it was told to use no cache, or its prompt is padded on the
            right.
    """
    if logits == 1 and inputs.get("use_cache") is False:
        raise ModelError(
            "use_cache=False lets generate bring all tokens again with every new one, and a SparseCache holds them: "
            "leave it out, or give the model its own attention back with restore(model)"
        )
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return
    if positions.shape[1] != new:
        _check_given(positions.shape[1], stored, new)
        held = f"; this cache holds {stored} already: reset() it for another prompt" if stored else ""
        raise ModelError(
            f"position_ids are [B,n], one position for a token, got {list(positions.shape)} for {new} tokens{held}"
        )
    if logits == 1 and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == stored + new:
        real = mask[:, stored:].to(positions.device, torch.bool)
        counted_back = real & (positions > positions[:, -1:])  # to the last token's position, where that is padding
        if not bool(real[:, -1].all()) and bool((counted_back.any(1) & ~real[:, -1]).any()):
            raise ModelError(
                "a prompt is padded on the right, and generate goes on from the position of the padding: pad it on the "
                "left (tokenizer.padding_side = 'left')"
            )


def _check_given(given: int, stored: int, new: int) -> None:
    """Raise a ModelError where `new` is what `generate` leaves of `given` tokens, which are no more than the stored."""
    if given <= stored and new == max(2 * given - stored, 0):
        raise ModelError(
            f"this cache holds {stored} tokens, and generate was given {given}: give it those ids and the new ones, or "
            f"reset() it"
        )


def _check_behind(at: Tensor, stored: int) -> None:
    """Check that positions `[B,n]` of new tokens are none that as many stored ones must have, else ModelError."""
    first = int(at[:, 0].min())
    if 0 <= first < stored:
        _check_given(int(at[:, -1].max()) + 1, stored, at.shape[1])
        raise ModelError(
            f"this cache holds {stored} tokens, and the position_ids of new ones begin at {first}: they begin at "
            f"{stored} or behind it; reset() the cache for another prompt"
        )
