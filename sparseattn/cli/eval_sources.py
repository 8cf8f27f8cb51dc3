"""What `eval` asks a model: generated tasks, the user's own prompts, and windows of a text to predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparseattn.cli.common import open_text
from sparseattn.cli.eval_plan import Wanted
from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.base import Example, Filler
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.filler import from_text, made_up
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.prompts import read_prompts
from sparseattn.evaluation.tasks.registry import TASKS, example
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.traces.texts import TEXTS

OWN_TOKENS = 64  # of an answer to a prompt of the user's
OWN_KIND = "a file"  # the kind of a text that is not known by name


@dataclass(frozen=True)
class Passage:
    """A text to predict.

    Args:
        name: as tables call it.
        kind: of text, such as "novel".
        words: all of it.
    """

    name: str
    kind: str
    words: str


@dataclass(frozen=True, eq=False)
class Files:
    """What the user's files hold.

    Args:
        prompts: the examples of each file of prompts.
        filler: makes the sentences that needles are hidden in.
        texts: those to predict.
    """

    prompts: Sequence[Sequence[Example]]
    filler: Filler
    texts: Sequence[Passage]

    @classmethod
    def read(
        cls,
        prompts: Iterable[Path],
        scoring: str,
        template: str,
        tail: int,
        filler: str | None,
        texts: Iterable[str],
    ) -> Files:
        """Reads them all, before a model is loaded.

        Raises:
            OSError: no such file.
            ValueError: naming the file, and the line of a prompt that cannot be used; a text that cannot be had, or two
                of one name.
        """
        layout = template.replace("\\n", "\n")
        return cls(
            [read_prompts(path, scoring, layout, tail) for path in dict.fromkeys(prompts)],
            made_up if filler is None else from_text(open_text(filler)[1]),
            _passages(texts),
        )


def _passages(given: Iterable[str]) -> list[Passage]:
    found: dict[str, Passage] = {}
    for one in dict.fromkeys(given):
        name, words = open_text(one)
        if name in found:
            raise ValueError(f"two texts are called {name}, which tables could not tell apart: rename a file")
        found[name] = Passage(name, TEXTS[one].kind if one in TEXTS else OWN_KIND, words)
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Source:
    """Prompts of one task, made one by one when their turn comes.

    Args:
        task: its name.
        count: how many.
        make: makes them.
    """

    task: str
    count: int
    make: Callable[[], Iterable[Prompt]]


def sources(plan: Wanted, files: Files, engine: Engine, tokens: Tokens) -> list[Source]:
    """All that is asked; what does not fit the model is refused here, before anything is measured.

    Raises:
        ValueError: naming the option, a length that is too short for its task or too long for the model.
    """
    found = [_generated(name, plan, files.filler, engine, tokens) for name in plan.tasks if name != AGREEMENT]
    found += [_own(examples, plan, engine, tokens) for examples in files.prompts]
    if files.texts:
        engine.check(plan.lengths[-1], "--lengths")
        found += [_windows(text, plan, tokens) for text in files.texts]
    return found


def _generated(name: str, plan: Wanted, filler: Filler, engine: Engine, tokens: Tokens) -> Source:
    """A task over the grid of lengths and depths."""
    depths = list(plan.depths) if TASKS[name].uses_depth else [0.0]
    make_one = functools.partial(example, name, count=tokens.count, filler=filler, spare=tokens.spare)
    longest = plan.lengths[-1]
    for depth in depths:
        shortest = Prompt.of(make_one(plan.lengths[0], depth, plan.seed), tokens, plan.answer_tokens)
        engine.check(longest + shortest.limit, f"--lengths {longest} with an answer of {shortest.limit} tokens")

    def make() -> Iterator[Prompt]:
        for length in plan.lengths:
            for depth in depths:
                for seed in plan.seeds:
                    yield Prompt.of(make_one(length, depth, seed), tokens, plan.answer_tokens)

    return Source(name, len(plan.lengths) * len(depths) * plan.samples, make)


def _own(examples: Sequence[Example], plan: Wanted, engine: Engine, tokens: Tokens) -> Source:
    """A file of the user's, cut to `--max-length` where that is given."""
    limit, longest, most = plan.answer_tokens or OWN_TOKENS, plan.max_length, engine.positions
    if longest is not None and most is not None and longest > most:
        raise ValueError(f"--max-length is at most the model's {most} positions, got {longest}")

    def make() -> Iterator[Prompt]:
        for one in examples:
            prompt = Prompt.of(one, tokens, limit)
            if longest is not None:
                prompt = prompt.shortened(longest, tokens, "--max-length")
            what = f"{prompt.name} with its answer"
            engine.check(prompt.tokens + limit, what, f"; --max-length {most} cuts the middle out of its context")
            yield prompt

    for _ in make():  # not kept: lists of a million tokens take more memory than tokenizing twice takes time
        pass
    return Source(examples[0].task, len(examples), make)


def _windows(text: Passage, plan: Wanted, tokens: Tokens) -> Source:
    """Windows of a text, evenly spread over it."""
    ids = tokens.ids(text.words)
    spare = len(tokens.start)
    if plan.lengths[0] < plan.last + 2:
        raise ValueError(
            f"a window of --lengths {plan.lengths[0]} tokens does not hold --last {plan.last} and 2 before them"
        )
    if len(ids) < plan.lengths[-1]:
        raise ValueError(f"{text.name} has {len(ids)} tokens, fewer than --lengths {plan.lengths[-1]}")

    gaps = max(plan.samples - 1, 1)
    starts = {
        length: sorted({round(i * (len(ids) + spare - length) / gaps) for i in range(plan.samples)})
        for length in plan.lengths
    }

    def make() -> Iterator[Prompt]:
        for length, places in starts.items():
            for start in places:
                facts = {
                    "task": AGREEMENT,
                    "text": text.name,
                    "kind": text.kind,
                    "length": length,
                    "start": start,
                }
                yield Prompt.passage(facts, [*tokens.start, *ids[start : start + length - spare]], plan.last)

    return Source(AGREEMENT, sum(map(len, starts.values())), make)
