"""InfLLM-V2: a block scores as the best of the windows of mean keys that touch it. https://arxiv.org/abs/2509.24663"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparseattn.kernels.group_vote.dispatch import vote
from sparseattn.selectors.pages.base import Entries, PageSelector

STRIDE = 16  # rows from one window to the next


class InfLLM2(PageSelector):
    """Reads the blocks touched by the windows whose mean keys have the largest shares of a softmax.

    A window is 32 consecutive rows, and one begins every 16 rows. Each query head takes the softmax of its logits with
    the windows' mean keys; shares are summed over the query group. A block's score is the largest share among the
    windows that have a row in it, those that reach into it from its neighbours among them.

    Args:
        page: rows of a block, a power of two, 16 or more; 64 as in the paper's models.
        group: "softmax" (default): as above; "sum", "max": a group's logits are summed, or the largest counts, in place
            of shares; "each": every query head chooses by its own logits.

    The mean key of every 16 rows is stored, of which two make a window: `D / 16` numbers a row. Facts are from the
    authors' code (OpenBMB/infllmv2_cuda_impl) and its tests. Of two blocks that share their best window the older is
    read first, which that code leaves open. Windows are of the sealed rows alone here: those of sink
    and recent rows, which every query reads, take no share. The models of the paper are trained for this score, other
    models are not.

    `scan_bytes`: the mean keys.

    Raises:
        ValueError: a block of fewer rows, or no power of two.
    """

    entry_names = ("means",)
    operators = 20

    def __init__(self, page: int = 64, group: str = "softmax") -> None:
        super().__init__(page, group)
        if page < STRIDE:
            raise ValueError(f"a block has a window's stride of {STRIDE} rows or more, got a page of {page}")

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        parts = keys.unflatten(2, (-1, self.page // STRIDE, STRIDE))
        return {"means": parts.float().mean(4).to(keys.dtype)}  # [B,H,P,page/16,D]

    def why_not_compared(self) -> str | None:
        return "a block's best window may reach into it from a neighbour, which another process has"

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        means = entries["means"]
        each = means.shape[3]
        half = query.float() @ means.flatten(2, 3).float().mT / self.temperature(query.shape[3])  # [B,H,G,P*each]
        windows = (half[..., :-1] + half[..., 1:]) / 2
        there = real.repeat_interleave(each, 1)
        windows = windows.masked_fill(~(there[:, 1:] & there[:, :-1])[:, None, None], -torch.inf)
        voted = vote(functional.pad(windows, (1, 1), value=-torch.inf), self.group)  # [B,Hs,P*each+1]
        # Window i has rows of parts i - 1 and i, counted with the one that was put before the first.
        best = voted.unfold(2, each + 1, each).amax(-1)  # [B,Hs,P]
        shared = functional.pad(best[..., 1:] == best[..., :-1], (1, 0))
        best = torch.where(shared, torch.nextafter(best, torch.full_like(best, -torch.inf)), best)
        # A lone block of 16 rows has no window: it may be read, behind all others.
        lone = real[:, None] & best.isneginf()
        return torch.where(lone, torch.finfo(torch.float32).min, best).masked_fill(~real[:, None], -torch.inf)
