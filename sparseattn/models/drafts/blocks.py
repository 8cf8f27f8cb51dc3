"""Blocks of a lossless generation that are timed, behind a prompt that was prefilled once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.models.drafts.length import DraftLength
from sparseattn.models.drafts.loop import DraftLoop
from sparseattn.models.drafts.rules import Rules
from sparseattn.models.drafts.stats import LosslessStats
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_cache import SparseCache


@dataclass(frozen=True)
class TimedTokens:
    """Some tokens of a generation.

    Args:
        seconds: all of them took.
        tokens: how many they were.
        stats: what ran.
    """

    seconds: float
    tokens: int
    stats: LosslessStats


def _never(ids: Tensor, scores: object) -> Tensor:
    """Return a stopping criterion that never stops."""
    return torch.zeros(len(ids), dtype=torch.bool)


def loop_behind(prefill: Prefill, cache: SparseCache, ids: Tensor, length: DraftLength) -> DraftLoop:
    """Return a greedy loop without an end behind a prompt, whose first token is chosen.

    Args:
        prefill: of the prompt.
        cache: made by `prefill.cache`.
        ids: `[1,T]`, the prompt.
        length: how many tokens are drafted.
    """
    loop = DraftLoop(cache.model, cache, ids, Rules([], _never, False), length, 0.0)
    cache.activate_past_recording()
    first = prefill.logits.argmax(-1, keepdim=True)
    loop.begin(first, torch.tensor([ids.shape[1]]), prefill.logits[:, None].float())
    return loop


def advance(loop: DraftLoop, tokens: int) -> TimedTokens:
    """Let a loop of one sequence make so many tokens or a few more."""
    loop.stats = LosslessStats()
    before, started = loop.ends[0], time.perf_counter()
    while loop.ends[0] < before + tokens:
        loop.round()
    return TimedTokens(time.perf_counter() - started, loop.ends[0] - before, loop.stats)
