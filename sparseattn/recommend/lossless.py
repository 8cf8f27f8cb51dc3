"""Method, budget and number of drafts that generate losslessly at the most tokens a second, by the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparseattn.core.budget import Budget, budget_label
from sparseattn.models.drafts.blocks import TimedTokens, advance, loop_behind
from sparseattn.models.drafts.length import FixedLength
from sparseattn.models.prefill import Prefill
from sparseattn.selectors.registry import as_selector

GAIN = 1.05  # times plain decoding below which drafts are not worth recommending


@dataclass(frozen=True)
class DraftChoice:
    """How to draft, and what came of it.

    Args:
        selector, budget: of draft steps; "" and None for plain dense steps.
        drafts: tokens drafted before each check; 0: plain dense steps.
        tokens_a_second: over all prompts.
        to_plain: times as fast as plain dense steps of the same prompts.
        acceptance: drafts accepted, over all prompts; None without drafts.
        choose_once: whether the drafts between two checks read the rows that the first of them chose.
    """

    selector: str
    budget: Budget
    drafts: int
    tokens_a_second: float
    to_plain: float
    acceptance: float | None
    choose_once: bool = False

    @property
    def written(self) -> str | None:
        """The budget as text; None where there is none, or the method does not look at it."""
        return budget_label(self.budget) if self.drafts and as_selector(self.selector).uses_budget else None

    def record(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            "selector": self.selector,
            "budget": self.written,
            "drafts": self.drafts,
            "choose_once": self.choose_once,
            "tokens_a_second": round(self.tokens_a_second, 3),
            "to_plain": round(self.to_plain, 3),
            "acceptance": None if self.acceptance is None else round(self.acceptance, 4),
        }


@dataclass(frozen=True)
class DraftTrial:
    """What is measured.

    Args:
        methods, budgets, drafts: to choose among; two drafts or more also with one choice for all of them.
        tokens: of each block that is timed.
        sink, window: of the caches.
        chunk: tokens a forward pass of a prefill.
    """

    methods: Sequence[str]
    budgets: Sequence[Budget]
    drafts: Sequence[int]
    tokens: int
    sink: int
    window: int
    chunk: int

    @property
    def caches(self) -> list[tuple[str, Budget]]:
        """Each method with its budgets; one that no budget changes has None."""
        return [
            (method, budget)
            for method in self.methods
            for budget in (self.budgets if as_selector(method).uses_budget else [None])
        ]

    def room(self, prompt: int) -> int:
        """Return the rows that blocks behind so many tokens of a prompt take at most, drafts that miss among them."""
        return prompt + (self.tokens + 16) * (2 * len(self.drafts) + 3)


def measured(model: Any, prompts: Sequence[Tensor], trial: DraftTrial, done: Callable[[], None]) -> list[DraftChoice]:
    """Return what each way to draft gives, the fastest first; plain dense steps are among them.

    On each prompt every method and budget has one cache, and its numbers of drafts take turns behind a block of plain
    steps over the same rows, with which they are compared.

    Args:
        model: of transformers; prepared for sparse attention while it runs.
        prompts: `[1,T]` each.
        trial: see `DraftTrial`.
        done: called after each method and budget on each prompt.
    """
    blocks: dict[tuple[str, Budget, int, bool], list[tuple[TimedTokens, TimedTokens]]] = {}
    for ids in prompts:
        prefill = Prefill(model, ids, chunk=trial.chunk)
        for method, budget in trial.caches:
            room = trial.room(ids.shape[1])
            cache = prefill.cache(method, budget, sink=trial.sink, window=trial.window, capacity=room)
            length = FixedLength(max(trial.drafts))
            loop = loop_behind(prefill, cache, ids, length)
            advance(loop, 1)  # compiles, and builds the index
            each_chose = loop.each_chose()
            length.drafts = 0
            plain = advance(loop, trial.tokens)
            for drafts in trial.drafts:
                for choose_once in (False, True) if each_chose and drafts > 1 else (False,):
                    length.drafts, loop.choose_once = drafts, choose_once
                    timed = advance(loop, trial.tokens), plain
                    blocks.setdefault((method, budget, drafts, choose_once), []).append(timed)
            done()
    choices = [_choice(*key, pairs) for key, pairs in blocks.items()]
    plainly = [plain for pairs in blocks.values() for _, plain in pairs]
    choices.append(DraftChoice("", None, 0, _rate(plainly), 1.0, None))
    return sorted(choices, key=lambda choice: -choice.to_plain)


def _choice(
    selector: str, budget: Budget, drafts: int, choose_once: bool, pairs: Sequence[tuple[TimedTokens, TimedTokens]]
) -> DraftChoice:
    rate, plainly = (_rate(blocks) for blocks in zip(*pairs, strict=True))
    drafted = sum(block.stats.drafted for block, _ in pairs)
    accepted = sum(block.stats.accepted for block, _ in pairs) / drafted
    return DraftChoice(selector, budget, drafts, rate, rate / plainly, accepted, choose_once)


def _rate(blocks: Sequence[TimedTokens]) -> float:
    """Return the tokens a second of all blocks together: one is few rounds, and a median over them would say what the
    commoner kind of round gives."""
    return sum(block.tokens for block in blocks) / sum(block.seconds for block in blocks)


def chosen(choices: Sequence[DraftChoice]) -> DraftChoice:
    """Return the fastest, or plain dense steps where nothing is `GAIN` times as fast."""
    best = choices[0]
    return best if best.to_plain >= GAIN else next(choice for choice in choices if not choice.drafts)
