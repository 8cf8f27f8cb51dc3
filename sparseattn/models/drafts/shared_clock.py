"""Processes that generate together draft alike: what each of them measured becomes what the slowest did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sparseattn.models.drafts.length import DraftLength, Round
from sparseattn.models.tensor_parallel import mesh_of


class SharedLength(DraftLength):
    """A length that goes by the clock, in processes whose every pass needs all of them.

    Their clocks differ. A process that drafted more than another would wait for it in the middle of a pass for ever.

    Args:
        length: what chooses, in each process from the same numbers.
        groups: of torch.distributed; this process is in each of them.
        device: whose tensors they send.
    """

    def __init__(self, length: DraftLength, groups: Sequence[Any], device: torch.device) -> None:
        self._length, self._groups, self._device = length, groups, device

    def next(self, context: int) -> int:
        """Return how many tokens to draft behind so many."""
        drafts = self._length.next(context)
        self.reason = self._length.reason
        return drafts

    def observe(self, came: Round) -> None:
        """Note what came of a round where it took the longest."""
        measured = [came.draft_seconds, came.verify_seconds, came.attention_seconds or 0.0]
        seconds = torch.tensor(measured, dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        drafted, verified, attended = seconds.tolist()
        known = came.attention_seconds is not None
        attention = attended if known else None
        came = replace(came, draft_seconds=drafted, verify_seconds=verified, attention_seconds=attention)
        self._length.observe(came)


def groups_of(cache: Any) -> list[Any]:
    """Return the groups of processes that run the passes of a `SparseCache` together: those that its rows are dealt to,
    and those that share its model."""
    mesh, ranks = mesh_of(cache.model), cache.ranks
    groups = [] if mesh is None else [mesh.get_group()]
    return groups if ranks is None or ranks.size == 1 else [*groups, ranks.group]
