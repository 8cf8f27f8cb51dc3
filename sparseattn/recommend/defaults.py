"""The methods and budgets that a plan is chosen from, where none are named."""

from __future__ import annotations

from sparseattn.core.budget import Budget

# Of each kind that runs without training what loses least at its bytes: rows by keys of few bits and by product codes,
# alone, with means for what is not read, and among the pages of another; clusters; pages by means and by directions.
METHODS = (
    "lowbit",
    "lowbit:bits=1,scales=8",
    "querypq",
    "tailed:inner=lowbit,rows=64",
    "tailed:inner=[lowbit:bits=1,scales=8],rows=64",
    "twostage:pages=[mean:bits=8],times=4",
    "selfindex",
    "retroinfer",
    "mean:bits=8",
    "quad:bits=8",
)
SERVED = (
    "quest",
    "lowbit:bits=1,page=16",
    "lowbit:page=16",
    "mean:bits=8",
    "quad:bits=8",
    "clse:bits=8",
)  # of these, those that vLLM can
BUDGETS: tuple[Budget, ...] = (32, 64, 96, 128, 192, 256, 512, 1024)  # rows
DRAFT_METHODS, DRAFT_BUDGETS = ("quest", "lowbit", "window"), (256, 1024)  # of --lossless: each takes seconds a prompt
