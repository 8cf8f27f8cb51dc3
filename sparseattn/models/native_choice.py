"""What the index of a model itself chose for a pass, as an attention call brings it.

transformers passes rows as `indices` (DeepSeek-V3.2 and its kin, https://arxiv.org/abs/2512.02556), blocks as
`block_indices` (MiniMax-M3), or folds the choice into the mask (Qwen's QSA). Its own implementations then attend by a
mask over all rows; for any other name the models leave that mask out, so that who answers a call applies the choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparseattn.core.selection import Selection
from sparseattn.models.cache_argument import installed
from sparseattn.models.errors import ModelError

PASSED = ("indices", "block_indices")  # names under which models pass what their index chose


@dataclass(frozen=True, eq=False)
class NativeChoice(ABC):
    """What n tokens of B sequences are to read, of the N columns up to and with their own.

    Args:
        ids: what was passed.
        columns: N, the pass's tokens among them.
        mask: the model's, `[B,1,n,N]`, bool or added to logits; None: each token sees all up to its own.
    """

    ids: Tensor
    columns: int
    mask: Tensor | None

    @property
    def tokens(self) -> int:
        """n."""
        return self.ids.shape[2]

    @property
    def lists(self) -> int:
        """Hs: 1, or one for each KV head."""
        return self.ids.shape[1]

    @abstractmethod
    def chosen(self) -> Tensor:
        """Return `[B,Hs,n,N]` bool: what was chosen, future and padding perhaps among it."""

    @abstractmethod
    def listed(self, token: int) -> Tensor:
        """Return `[B,Hs,S]` int64: the columns that a token reads; -1 is unused."""

    def packed(self, token: int, slots: int) -> Tensor:
        """Return `listed` as `[B,Hs,slots]`, what is used first, in its order."""
        rows = self.listed(token)
        rows = rows.gather(-1, (rows < 0).to(torch.int8).argsort(dim=-1, stable=True))
        return torch.nn.functional.pad(rows, (0, max(slots - rows.shape[-1], 0)), value=-1)[..., :slots]

    def selection(self, token: int, heads: int) -> Selection:
        """Return the columns that a token reads, for H = `heads` KV heads."""
        rows = self.listed(token)
        return Selection.tokens(rows.expand(-1, heads, -1) if rows.shape[1] == 1 else rows)

    def allowed(self) -> Tensor:
        """Return `[B,Hs,n,N]` bool: what each token reads."""
        return self.chosen() & self._seen()

    @property
    def boolean(self) -> bool:
        """Whether the model's own mask of its choice is of bool; where a query sees nothing, the two differ."""
        return self.mask is None or self.mask.dtype == torch.bool

    def as_mask(self, like: Tensor, num_heads: int) -> Tensor:
        """Return `[B,1 or HG,n,N]`: what each head reads, bool or an addend of logits of the dtype of `like`."""
        allowed = self.allowed()
        if allowed.shape[1] > 1:
            allowed = allowed.repeat_interleave(num_heads // allowed.shape[1], 1)
        if self.boolean:
            return allowed
        least = torch.finfo(like.dtype).min
        return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, least)

    def _seen(self) -> Tensor:
        """Return `[B or 1,1,n,N]` bool: what the model's mask lets each token see."""
        if self.mask is not None:
            return self.mask if self.mask.dtype == torch.bool else self.mask > torch.finfo(self.mask.dtype).min / 2
        column = torch.arange(self.columns, device=self.ids.device)
        return (column <= column[-self.tokens :, None])[None, None]

    def _only_seen(self, rows: Tensor, token: int) -> Tensor:
        """Return the `rows` `[B,Hs,S]`, -1 in place of what a token does not see."""
        last = self.columns - self.tokens + token
        rows = torch.where((rows >= 0) & (rows <= last), rows, -1)
        if self.mask is None:
            return rows
        seen = self._seen()[:, 0, token]  # [B,N]
        at = rows.clamp(min=0).flatten(1)
        return torch.where(seen.expand(len(rows), -1).gather(1, at).view_as(rows), rows, -1)


class RowChoice(NativeChoice):
    """Columns, `[B,n,S]`, the same for every head."""

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @property
    def lists(self) -> int:
        return 1

    def chosen(self) -> Tensor:
        batch, new, _ = self.ids.shape
        made = torch.zeros(batch, new, self.columns + 1, dtype=torch.bool, device=self.ids.device)
        at = torch.where(self.ids < 0, self.columns, self.ids).long()
        return made.scatter_(-1, at, True)[:, None, :, : self.columns]

    def listed(self, token: int) -> Tensor:
        return self._only_seen(self.ids[:, None, token].long(), token)


@dataclass(frozen=True, eq=False)
class BlockChoice(NativeChoice):
    """Blocks of `block` columns, `[B,Hs,n,S]`.

    Args:
        padded: whether some columns are padding, so that not every column of a block up to the token's own is read.
    """

    block: int
    padded: bool

    @property
    def boolean(self) -> bool:
        return False

    def chosen(self) -> Tensor:
        batch, heads, new, _ = self.ids.shape
        blocks = -(-self.columns // self.block)
        made = torch.zeros(batch, heads, new, blocks + 1, dtype=torch.bool, device=self.ids.device)
        made.scatter_(-1, torch.where(self.ids < 0, blocks, self.ids).long(), True)
        return made[..., :blocks].repeat_interleave(self.block, -1)[..., : self.columns]

    def listed(self, token: int) -> Tensor:
        first = self.ids[:, :, token].long()[..., None] * self.block
        rows = first + torch.arange(self.block, device=first.device)
        return self._only_seen(torch.where(first < 0, -1, rows).flatten(2), token)

    def selection(self, token: int, heads: int) -> Selection:
        if self.padded or self.block & (self.block - 1):
            return super().selection(token, heads)
        ids = self.ids[:, :, token].long()
        if ids.shape[1] == 1:
            ids = ids.expand(-1, heads, -1)
        start = ids.clamp(min=0) * self.block
        length = (self.columns - self.tokens + token + 1 - start).clamp(0, self.block) * (ids >= 0)
        return Selection(start.int(), length.int(), self.block)


class MaskChoice(NativeChoice):
    """The choice that a model's mask holds already; `ids` is that mask."""

    def chosen(self) -> Tensor:
        return self._seen()

    def listed(self, token: int) -> Tensor:
        seen = self._seen()[:, :, token]  # [B,Hs,N]
        if seen.shape[0] == seen.shape[1] == 1:
            return seen[0, 0].nonzero().view(1, 1, -1)
        most = int(seen.sum(-1).max())
        chosen, rows = seen.to(torch.uint8).topk(most, dim=-1)
        return torch.where(chosen > 0, rows, -1)


def passed(options: Mapping[str, Any]) -> str | None:
    """Return the name under which a call passes a choice; None where it passes none."""
    return next((name for name in PASSED if options.get(name) is not None), None)


def has_index(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether a layer has an index of its own, or reads what that of another layer chose (GLM's `skip_topk`)."""
    own = isinstance(getattr(module, "indexer", None), nn.Module)
    return own or passed(options) is not None or getattr(module, "skip_topk", False) is True


def choice_of(
    module: nn.Module, options: Mapping[str, Any], mask: Any, tokens: int, columns: int, padded: bool
) -> NativeChoice:
    """Return what the index of a layer chose for a call.

    Args:
        module: the layer's attention.
        options, mask: of the call.
        tokens, columns: n and N.
        padded: whether some columns are padding.

    Raises:
        ModelError: a choice of another form.
    """
    name = passed(options)
    if name is None:
        if not (isinstance(mask, Tensor) and mask.ndim == 4 and tuple(mask.shape[2:]) == (tokens, columns)):
            raise _unreadable(module, f"passes no {' or '.join(PASSED)} and no mask [B,1,{tokens},{columns}]")
        return MaskChoice(mask, columns, mask)
    ids = options[name]
    wanted = 3 if name == "indices" else 4
    fits = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool
    if not fits or ids.ndim != wanted or ids.shape[wanted - 2] != tokens:
        shape = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        form = f"[B,{tokens},S]" if wanted == 3 else f"[B,Hs,{tokens},S]"
        raise _unreadable(module, f"passes {name} as {shape}, and integers {form} are read")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
        raise _unreadable(module, f"passes {name} with a mask other than [B,1,n,N]")
    mask = None if mask is None else mask[..., :columns]
    if wanted == 3:
        return RowChoice(ids, columns, mask)
    block = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(block, int):
        raise _unreadable(module, "passes block_indices and its indexer has no block_size")
    return BlockChoice(ids, columns, mask, block, padded)


def check_lists(layer: int, lists: int, heads: int) -> None:
    """Refuse, by ModelError, a choice of neither one list for all KV heads nor one for each."""
    if lists not in (1, heads):
        raise ModelError(f"layer {layer} chooses for {lists} of its {heads} KV heads: one or all are read")


def _unreadable(module: nn.Module, what: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__} of {installed()} {what}: what its own index chose "
        f"cannot be read, use the model without sparse attention"
    )
