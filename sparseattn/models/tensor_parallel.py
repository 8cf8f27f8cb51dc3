"""Models whose layers processes share, each with its own heads: `tp_plan="auto"` of transformers, under torchrun.

Every process runs the same program on the same inputs. A layer's attention is called with the heads of its process, so
a `SparseCache` there holds and chooses rows of these alone, and nothing of it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch.distributed as dist

from sparseattn.core.context import Heads
from sparseattn.models.attention_routing import name_of
from sparseattn.models.errors import ModelError
from sparseattn.roles.role import Share
from sparseattn.selectors.abilities import ComparesHeads
from sparseattn.selectors.base import Selector

Counted = TypeVar("Counted")


def mesh_of(model: Any) -> Any:
    """Return the mesh of the processes that share a model's layers, of one dimension; None: it is in one process."""
    mesh = getattr(model, "_device_mesh", None)
    if int(getattr(model, "_tp_size", None) or 1) == 1 or mesh is None:
        return None
    return mesh["tp"] if mesh.ndim > 1 else mesh


@dataclass(frozen=True)
class HeadShare:
    """Which heads of every layer this process has: the `rank`-th of `size` equal parts.

    Args:
        rank: of this process among those that share the model, from 0.
        size: how many these are; 1: it has all heads.
        group: these processes; None: the default group of torch.distributed.
    """

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, model: Any, heads: int) -> HeadShare:
        """Return what this process has of a model one of whose layers is called with `heads` KV heads here.

        Raises:
            ModelError: heads that are not shared evenly.
        """
        mesh = mesh_of(model)
        if mesh is None:
            return cls()
        config = model.config.get_text_config(decoder=True)
        every = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if heads == every:  # a plan that leaves attention whole in each process
            return cls()
        size = int(model._tp_size)
        if heads * size != every:
            raise ModelError(
                f"{name_of(model)} has {every} KV heads, and {heads} of them are in this one of {size} processes: "
                f"sparse attention needs the same number in each, so start as many processes as divide {every}"
            )
        return cls(mesh.get_local_rank(), size, mesh.get_group())

    def every(self, heads: int) -> int:
        """Return how many KV heads a layer has in all, of which `heads` are here."""
        return heads * self.size

    def heads(self, heads: int) -> Heads | None:
        """Return which of a layer's KV heads the `heads` are that are here; None: all."""
        first = self.rank * heads
        return None if self.size == 1 else Heads(tuple(range(first, first + heads)), self.every(heads))

    def of_shares(self, shares: Sequence[Share], heads: int) -> list[Share]:
        """Return, of the shares of a whole layer, what they have of the `heads` that are here, numbered from 0."""
        if self.size == 1:
            return list(shares)
        first, every = self.rank * heads, []
        for share in shares:
            if share.heads is None:
                every.append(share)
            elif which := tuple(head - first for head in share.heads.which if first <= head < first + heads):
                every.append(replace(share, heads=None if len(which) == heads else Heads(which, heads)))
        return every

    def check(self, selector: Selector, heads: int) -> None:
        """Refuse, by ValueError, a method that would choose by the heads that are here where it compares all."""
        if self.size > 1 and (comparing := selector.find(ComparesHeads)):
            raise ValueError(
                f"{comparing[0]!r} compares all {self.every(heads)} KV heads of a layer, and each of the {self.size} "
                f"processes that share this model has {heads}: take a method that chooses for each KV head alone, such "
                f"as quest or lowbit, or load the model in one process"
            )

    def of_all(self, counted: Counted) -> list[Counted]:
        """Return what every process has counted of its own heads; all of them call this together."""
        if self.size == 1:
            return [counted]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, counted, group=self.group)
        return every

    def require_whole(self, what: str) -> None:
        """Refuse, by ValueError, what is of all heads of a layer where other processes have the rest."""
        if self.size > 1:
            raise ValueError(
                f"{what} is of all heads of a layer, and this is one of {self.size} processes that share them: make it "
                f"with the model in one process"
            )
