"""The user's files of prompts: read, said what they are, and made into prompts that fit the model."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from sparseattn.cli import options as shared
from sparseattn.cli.command import say
from sparseattn.cli.eval_options import OWN_TOKENS, EvalOptions
from sparseattn.cli.inputs import open_tokenizer
from sparseattn.evaluation.layouts.base import TAIL, Setup
from sparseattn.evaluation.layouts.registry import PromptFile, read_prompts
from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.decoder import check_positions
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.scoring import SCORINGS
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.load import positions_of

ANOTHER = "{context}\n\n\n{question}"  # a template that is nobody's


def prompt_file(path: Path, options: EvalOptions) -> PromptFile:
    """Return a file of prompts and say what it was read as. Raises as `Files.read`."""
    file = read_prompts(path, _setup(path, options), options.layout)
    own = shared.spelled(name for name in ("scoring", "template", "tail") if name in options.given)
    if own and file.layout != "plain":
        raise ValueError(f"{path} has the layout {file.layout}, which has its own prompts and scores: leave out {own}")
    tasks = Counter(example.task for example in file.examples)
    kinds = ", ".join(f"{task} {count}" for task, count in tasks.items())
    source = " (told from its fields)" if file.guessed else ""
    left = f"; {file.left_out} lines that the benchmark leaves out" if file.left_out else ""
    say(f"{path}: layout {file.layout}{source}, prompts: {kinds}{left}")
    if file.skipped:
        say(f"{path}: files without prompts are skipped: {', '.join(str(p.relative_to(path)) for p in file.skipped)}")
    if file.examples[0].meta.get("templates_checked") is False:
        say(
            f"this file of {file.layout} is not the one that was checked; its hash is in the records",
            "yellow",
        )
    return file


def _setup(path: Path, options: EvalOptions) -> Setup:
    return Setup(
        path,
        templates=options.templates,
        demos=options.demos,
        chat=options.chat,
        scoring=options.scoring,
        template=options.template.replace("\\n", "\n"),
        tail=options.tail,
    )


def check_used(files: Sequence[PromptFile], options: EvalOptions) -> None:
    """Refuse options of files of prompts that none of them is read by.

    Raises:
        ValueError: naming the option, `--templates`, `--demos`, `--tail` or `--template`.
    """
    layouts = ", ".join(dict.fromkeys(file.layout for file in files))
    if options.templates and not any("templates" in file.examples[0].meta for file in files):
        raise ValueError(f"--templates is for benchmarks with a file of prompts, and {layouts} has none: leave it out")
    if options.demos and all(file.layout != "helmet" for file in files):
        raise ValueError(f"--demos is for the layout helmet, and these prompts are of {layouts}: leave it out")
    if options.tail != TAIL and all(_same(file, options, tail=TAIL) for file in files):
        raise ValueError(
            f"--tail {options.tail} has no effect: all prompts have a context and a question; leave it out"
        )
    if "template" in options.given and all(_same(file, options, template=ANOTHER) for file in files):
        raise ValueError("--template has no effect: no prompt is in two parts, context and question; leave it out")


def _same(file: PromptFile, options: EvalOptions, **changes: Any) -> bool:
    """Whether a file reads the same with something else in its setup."""
    try:
        again = read_prompts(file.path, replace(_setup(file.path, options), **changes), options.layout)
    except ValueError:  # such as a prompt that is shorter than another tail
        return False
    return again.examples == file.examples


def lines_of(files: Sequence[PromptFile]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Return what was read of the layout kvpress, by the file's name and the line's number, for its form of results.

    Raises:
        ValueError: a file of another layout, or two files of one name.
    """
    lines: dict[tuple[str, int], Mapping[str, Any]] = {}
    for file in files:
        if file.layout != "kvpress":
            raise ValueError(
                f"--results kvpress needs --prompts in the layout kvpress, and {file.path} has {file.layout}"
            )
        for example in file.examples:
            place = (example.meta["file"], example.meta["line"])
            if place in lines:
                raise ValueError(f"--results kvpress needs files with different names, and two are called {place[0]}")
            lines[place] = example.fields
    return lines


class Unopened:
    """What is known of a model before its weights are loaded, in an engine's place."""

    def __init__(self, positions: int | None) -> None:
        self.positions = positions

    def check(self, tokens: int, what: str, remedy: str = "") -> None:
        """ModelError where the model has no positions for so many tokens."""
        check_positions(self.positions, tokens, what, remedy)


def check_before_loading(name: str, files: Sequence[PromptFile], options: EvalOptions) -> bool:
    """Check that prompts fit the model `name`, by its tokenizer and config alone; return whether that says all.

    A GGUF file that is not converted yet has no config to say how long prompts may be.

    Raises:
        ValueError: naming file and line of a prompt that is too long, or an option that does not fit; a budget, sink or
            window that leaves no row of the longest prompt out.
    """
    if not files:
        return True
    engine, tokens = Unopened(positions_of(name)), Tokens(open_tokenizer(name), options.chat)
    options.check_effect(max(check_prompts(file, options, engine, tokens) for file in files))
    return engine.positions is not None


# A task, its examples and what makes their prompts.
Made: TypeAlias = tuple[str, Sequence[Example], Callable[[], Iterator[Prompt]]]


def own_prompts(
    file: PromptFile, options: EvalOptions, engine: Engine | Unopened, tokens: Tokens, check: bool
) -> list[Made]:
    """Return the prompts of each task of a file, cut to `--max-length` where that is given.

    Args:
        file: the file.
        options: of the command.
        engine: what answers, or what is known of it.
        tokens: what prompts are counted in.
        check: make every prompt once now, so that what is wrong with one is said before any work.

    Raises:
        ValueError: naming file and line, a prompt that is too long or that the chat template does not take.
    """
    if check:
        check_prompts(file, options, engine, tokens)
    return [
        (task, examples, functools.partial(_made, examples, options, engine, tokens))
        for task, examples in by_task(file.examples)
    ]


def check_prompts(file: PromptFile, options: EvalOptions, engine: Engine | Unopened, tokens: Tokens) -> int:
    """Make every prompt of a file once, and return the tokens of the longest with its answer. Raises `own_prompts`."""
    longest, most = options.max_length, engine.positions
    if longest is not None and most is not None and longest > most:
        raise ValueError(f"--max-length must not exceed the model's {most} tokens, got {longest}")
    if longest is not None and any(example.chat and example.chat.before for example in file.examples):
        raise ValueError(
            f"{file.path} contains conversations, which --max-length would cut in the middle: leave it out"
        )
    # Not kept: lists of a million tokens take more memory than twice takes time.
    return max(prompt.tokens + prompt.limit for prompt in _made(file.examples, options, engine, tokens))


def _made(
    examples: Sequence[Example], options: EvalOptions, engine: Engine | Unopened, tokens: Tokens
) -> Iterator[Prompt]:
    remedy = f"; --max-length {engine.positions} cuts the middle out of its context"
    for example in examples:
        prompt = Prompt.of(example, tokens, options.answer_tokens or example.limit or _unsaid_limit(example))
        if options.max_length is not None:
            prompt = prompt.shortened(options.max_length, tokens, "--max-length")
        engine.check(prompt.tokens + prompt.limit, f"{prompt.name} with its answer", remedy)
        yield prompt


def _unsaid_limit(example: Example) -> int | None:
    """Return the limit of an answer where neither user nor benchmark names one; None: twice the right answer's and
    8."""
    return OWN_TOKENS if example.scoring in SCORINGS else None


def by_task(examples: Sequence[Example]) -> list[tuple[str, list[Example]]]:
    """Return the examples of each task of a file, in the order in which the tasks come first."""
    grouped: dict[str, list[Example]] = {}
    for example in examples:
        grouped.setdefault(example.task, []).append(example)
    return list(grouped.items())
