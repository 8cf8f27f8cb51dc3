"""What `eval` asks a model: generated tasks, the user's own prompts, and windows of a text to predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparseattn.cli.eval_plan import PPL, Plan
from sparseattn.tasks import TASKS, Example, Filler, example
from sparseattn.tasks.decoder import ModelDecoder
from sparseattn.tasks.filler import from_text, made_up
from sparseattn.tasks.prompts import read_prompts, read_text
from sparseattn.tasks.run import Prompt
from sparseattn.tasks.tokens import Tokens

OWN_TOKENS = 64  # of an answer to a prompt of the user's


@dataclass(frozen=True, eq=False)
class Files:
    """What the user's files hold.

    Args:
        prompts: the examples of each file of prompts.
        filler: makes the sentences that needles are hidden in.
        text: name and words of the text to predict; None where perplexity is not asked for.
    """

    prompts: Sequence[Sequence[Example]]
    filler: Filler
    text: tuple[str, str] | None

    @classmethod
    def read(
        cls,
        prompts: Iterable[Path],
        scoring: str,
        template: str,
        tail: int,
        filler: Path | None,
        text: Path | None,
    ) -> Files:
        """Reads them all, before a model is loaded.

        Raises:
            OSError: no such file.
            ValueError: naming the file, and the line of a prompt that cannot be used.
        """
        layout = template.replace("\\n", "\n")
        return cls(
            [read_prompts(path, scoring, layout, tail) for path in dict.fromkeys(prompts)],
            made_up if filler is None else from_text(read_text(filler)),
            None if text is None else (text.name, read_text(text)),
        )


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


def sources(plan: Plan, files: Files, decoder: ModelDecoder, tokens: Tokens) -> list[Source]:
    """All that is asked; what does not fit the model is refused here, before anything is measured.

    Raises:
        ValueError: naming the option, a length that is too short for its task or too long for the model.
    """
    found = [_generated(name, plan, files.filler, decoder, tokens) for name in plan.tasks if name != PPL]
    found += [_own(examples, plan, decoder, tokens) for examples in files.prompts]
    if files.text is not None:
        decoder.check(plan.lengths[-1], "--lengths")
        found.append(_passages(*files.text, plan, tokens))
    return found


def _generated(name: str, plan: Plan, filler: Filler, decoder: ModelDecoder, tokens: Tokens) -> Source:
    """A task over the grid of lengths and depths."""
    depths = list(plan.depths) if TASKS[name].uses_depth else [0.0]
    make_one = functools.partial(example, name, count=tokens.count, filler=filler, spare=tokens.spare)
    longest = plan.lengths[-1]
    for depth in depths:
        shortest = Prompt.of(make_one(plan.lengths[0], depth, plan.seed), tokens, plan.answer_tokens)
        decoder.check(longest + shortest.limit, f"--lengths {longest} with an answer of {shortest.limit} tokens")

    def make() -> Iterator[Prompt]:
        for length in plan.lengths:
            for depth in depths:
                for seed in plan.seeds:
                    yield Prompt.of(make_one(length, depth, seed), tokens, plan.answer_tokens)

    return Source(name, len(plan.lengths) * len(depths) * plan.samples, make)


def _own(examples: Sequence[Example], plan: Plan, decoder: ModelDecoder, tokens: Tokens) -> Source:
    """A file of the user's, cut to `--max-length` where that is given."""
    limit, longest, most = plan.answer_tokens or OWN_TOKENS, plan.max_length, decoder.positions
    if longest is not None and most is not None and longest > most:
        raise ValueError(f"--max-length is at most the model's {most} positions, got {longest}")

    def make() -> Iterator[Prompt]:
        for one in examples:
            prompt = Prompt.of(one, tokens, limit)
            if longest is not None:
                prompt = prompt.shortened(longest, "--max-length")
            what = f"{prompt.name} with its answer"
            decoder.check(prompt.tokens + limit, what, f"; --max-length {most} cuts the middle out of its context")
            yield prompt

    for _ in make():  # not kept: lists of a million tokens take more memory than tokenizing twice takes time
        pass
    return Source(examples[0].task, len(examples), make)


def _passages(name: str, text: str, plan: Plan, tokens: Tokens) -> Source:
    """Windows of a text, evenly spread over it."""
    ids = tokens.ids(text)
    spare = len(tokens.start)
    if plan.lengths[0] < plan.last + 2:
        raise ValueError(
            f"a window of --lengths {plan.lengths[0]} tokens does not hold --last {plan.last} and 2 before them"
        )
    if len(ids) < plan.lengths[-1]:
        raise ValueError(f"{name} has {len(ids)} tokens, fewer than --lengths {plan.lengths[-1]}")

    gaps = max(plan.samples - 1, 1)
    starts = {
        length: sorted({round(i * (len(ids) + spare - length) / gaps) for i in range(plan.samples)})
        for length in plan.lengths
    }

    def make() -> Iterator[Prompt]:
        for length, places in starts.items():
            for start in places:
                facts = {"task": PPL, "file": name, "length": length, "start": start}
                yield Prompt.passage(facts, [*tokens.start, *ids[start : start + length - spare]], plan.last)

    return Source(PPL, sum(map(len, starts.values())), make)
