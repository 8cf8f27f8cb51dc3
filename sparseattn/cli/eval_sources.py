"""The prompts of `eval`: generated tasks, the user's own prompts, and windows of a text to predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sparseattn.cli.eval_options import EvalOptions
from sparseattn.cli.eval_prompts import check_used, own_prompts, prompt_file
from sparseattn.cli.eval_ruler import open_filler, open_material, ruler_prompts
from sparseattn.cli.inputs import InputText, open_texts
from sparseattn.evaluation.layouts.registry import PromptFile
from sparseattn.evaluation.ruler.tasks import TEMPLATES, Material
from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.base import Filler
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.filler import from_text, made_up
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.registry import TASKS, example
from sparseattn.evaluation.tasks.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Files:
    """What the user's files hold.

    Args:
        prompts: each file of prompts, with its examples.
        filler: makes the sentences that needles are hidden in.
        material: of RULER's tasks; None where none is asked for.
        texts: those to predict.
    """

    prompts: Sequence[PromptFile]
    filler: Filler
    material: Material | None
    texts: Sequence[InputText]

    @classmethod
    def read(cls, options: EvalOptions) -> Files:
        """Read them all, before a model is loaded.

        Raises:
            OSError: no such file.
            ImportError: a package that a file or a metric needs is missing.
            ValueError: naming the file, and the line of a prompt that cannot be used; a text that cannot be had, or two
                of one name.
        """
        prompts = [prompt_file(path, options) for path in dict.fromkeys(options.prompts or ())]
        check_used(prompts, options)
        return cls(
            prompts,
            made_up if options.filler is None else from_text(open_filler(options.filler)[1]),
            open_material(options),
            open_texts(options.text or ()),
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


def sources(options: EvalOptions, files: Files, engine: Engine, tokens: Tokens, checked: bool = False) -> list[Source]:
    """Return all that is asked; what does not fit the model is refused here, before anything is measured.

    Args:
        options: of the command.
        files: what the user's files hold.
        engine: what answers.
        tokens: what prompts are counted in.
        checked: the user's own prompts are known to fit the model.

    Raises:
        ValueError: naming the option, a length that is too short for its task or too long for the model.
    """
    prompts = []
    for name in options.tasks:
        if name in TASKS:
            prompts.append(_generated(name, options, files.filler, engine, tokens))
        elif files.material is not None and name in TEMPLATES:
            make = ruler_prompts(name, options, files.material, engine, tokens)
            prompts.append(Source(name, len(options.prompt_lengths) * options.samples, make))
    prompts += [
        Source(task, len(examples), made)
        for file in files.prompts
        for task, examples, made in own_prompts(file, options, engine, tokens, check=not checked)
    ]
    if files.texts:
        engine.check(options.prompt_lengths[-1], "--lengths")
        prompts += [_windows(text, options, tokens) for text in files.texts]
    return prompts


def _generated(name: str, options: EvalOptions, filler: Filler, engine: Engine, tokens: Tokens) -> Source:
    """Return a task over the grid of lengths and depths."""
    depths = list(options.needle_depths) if TASKS[name].uses_depth else [0.0]
    make_one = functools.partial(example, name, count=tokens.count, filler=filler, spare=tokens.spare)
    longest = options.prompt_lengths[-1]
    engine.check(longest, f"a prompt of --lengths {longest}")  # before one is made
    for depth in depths:
        short = (make_one(options.prompt_lengths[0], depth, seed) for seed in options.seeds)
        answer = max(Prompt.of(drawn, tokens, options.answer_tokens).limit for drawn in short)
        engine.check(longest + answer, f"--lengths {longest} with an answer of {answer} tokens")

    def make() -> Iterator[Prompt]:
        for length in options.prompt_lengths:
            for depth in depths:
                for seed in options.seeds:
                    yield Prompt.of(make_one(length, depth, seed), tokens, options.answer_tokens)

    return Source(name, len(options.prompt_lengths) * len(depths) * options.samples, make)


def _windows(text: InputText, options: EvalOptions, tokens: Tokens) -> Source:
    """Return windows of a text, evenly spread over it."""
    ids = tokens.ids(text.words)
    spare = len(tokens.start)
    shortest, last = options.prompt_lengths[0], options.last
    if shortest < last + 2:
        raise ValueError(
            f"a window of --lengths {shortest} tokens is too short for --last {last} and the 2 tokens before them"
        )
    if len(ids) < options.prompt_lengths[-1]:
        raise ValueError(f"{text.name} has {len(ids)} tokens, fewer than --lengths {options.prompt_lengths[-1]}")

    gaps = max(options.samples - 1, 1)
    starts = {
        length: sorted({round(i * (len(ids) + spare - length) / gaps) for i in range(options.samples)})
        for length in options.prompt_lengths
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
                yield Prompt.passage(facts, [*tokens.start, *ids[start : start + length - spare]], options.last)

    return Source(AGREEMENT, sum(map(len, starts.values())), make)
