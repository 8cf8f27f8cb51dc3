"""The processes that a cache's rows are dealt to, and what they send each other at a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparseattn.core.rank_traffic import GATHERED
from sparseattn.kernels.attend.merge import merge, share

SHARES = ("exact", "union")


class Ranks:
    """The processes of a group, each with a part of every sequence's sealed rows (context parallelism).

    Every rank runs the same program with the same queries, keys and values. All keep sink and unsealed rows, which are
    few, and each attends to its part of these; of the sealed rows each keeps its own, dealt unit by unit (`Deal`).

    Args:
        group: of torch.distributed; None: the default group. Its backend sends tensors of the cache's device.
        share: how the ranks divide a budget. "exact": they agree on the best rows of all, so that a step reads what one
            process would read. "union": each reads the best of its own, `budget / ranks` rows, and nothing is sent
            before attention.
        slack: with "union", the share by which each rank's part of the budget is larger, 0 or more.

    Attributes:
        rank, size: of this process, and how many there are.
        gathered: bytes of outputs that a rank sends at most; where it were more, outputs are summed over the ranks.
        sent: bytes that this rank has sent, by purpose: "checks" of the prompt, "votes" (log-sum-exps), "choice"
            (scores) and "parts" (outputs).

    Raises:
        ValueError: torch.distributed that is not initialised, or a process that is not of the group; another `share`; a
            slack below 0, or with "exact".
    """

    def __init__(self, group: dist.ProcessGroup | None = None, share: str = "exact", slack: float = 0.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed has no processes yet: call torch.distributed.init_process_group first, as under "
                "torchrun"
            )
        if share not in SHARES:
            raise ValueError(f"share is one of {', '.join(SHARES)}, got {share!r}")
        if not 0 <= slack < float("inf") or (slack and share != "union"):
            raise ValueError(f"slack is 0 or more, of share='union' alone, got {slack} with {share!r}")
        self.group, self.share, self.slack = group, share, slack
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group: make the cache in the processes of it alone")
        self.gathered = GATHERED
        self.sent: Counter[str] = Counter()

    @classmethod
    def of(cls, group: Ranks | dist.ProcessGroup | None) -> Ranks | None:
        """Return `group` as ranks; None stays None.

        Raises:
            ValueError: another type, see also `Ranks`.
        """
        if group is None or isinstance(group, Ranks):
            return group
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group is a process group of torch.distributed, or Ranks of one, got {group!r}")
        return cls(group)

    def require_device(self, device: torch.device) -> None:
        """Raise ValueError where the group's backend sends no tensors of a device."""
        backends = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        if device.type not in backends:
            raise ValueError(
                f"this group's backend sends tensors of {', '.join(backends)}, and these rows are on {device}: make "
                f"the group with one that sends those, such as gloo for a CPU and nccl for a GPU"
            )

    def gather(self, part: Tensor, purpose: str) -> Tensor:
        """Return `[ranks,...]`: the `part` of every rank, which have one shape and dtype."""
        part = part.contiguous()
        every = part.new_empty(self.size, *part.shape)
        if self.size == 1 or not part.numel():
            return every.copy_(part)
        named = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before 2.13
        getattr(dist, named)(every.view(-1), part.view(-1), group=self.group)
        self.sent[purpose] += part.nbytes * (self.size - 1)
        return every

    def reduce(self, part: Tensor, how: dist.ReduceOp.RedOpType, purpose: str) -> Tensor:
        """Return the sum or maximum of every rank's `part`, in place; a ring sends it twice but for a rank's share."""
        dist.all_reduce(part, how, group=self.group)
        self.sent[purpose] += 2 * part.nbytes * (self.size - 1) // self.size
        return part

    def merged(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention over the rows of all ranks, of this one's `out` `[B,H,G,D]` and log-sum-exp `[B,H,G]`.

        It is the same on all ranks: each computes it from the same numbers in the same order.
        """
        if self.size == 1:
            return out, lse
        if (out.nbytes + lse.nbytes) * (self.size - 1) > self.gathered:
            return self._summed(out, lse)
        bits = [part.contiguous().view(torch.uint8) for part in (out, lse[..., None])]
        every, width = self.gather(torch.cat(bits, -1), "parts"), bits[0].shape[-1]
        outs, sums = (part.contiguous() for part in (every[..., :width], every[..., width:]))
        return merge(outs.view(out.dtype), sums.view(lse.dtype)[..., 0])

    def _summed(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        top = self.reduce(lse.clone(), dist.ReduceOp.MAX, "parts")
        weight = share(lse, top)[..., None]
        sums = self.reduce(torch.cat([out * weight, weight], -1), dist.ReduceOp.SUM, "parts")
        total = sums[..., -1]
        whole = sums[..., :-1] / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
        return whole.to(out.dtype), top + total.log()

    def require_same(self, what: Mapping[str, int], device: torch.device) -> None:
        """Raise ValueError, on every rank, where numbers differ from rank to rank."""
        own = torch.tensor(list(what.values()), device=device)
        every = self.gather(own, "checks").cpu()
        for name, of_ranks in zip(what, every.T.tolist(), strict=True):
            if len(set(of_ranks)) > 1:
                raise ValueError(
                    f"ranks of one cache are given the same rows and settings, and {name} is {of_ranks} on ranks 0 to "
                    f"{self.size - 1}: run the same program with the same inputs on each"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # processes are not copied

    def __repr__(self) -> str:
        slack = f", slack={self.slack:g}" if self.slack else ""
        return f"Ranks(rank {self.rank} of {self.size}, share={self.share!r}{slack})"
