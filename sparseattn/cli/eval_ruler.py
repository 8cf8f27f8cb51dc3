"""RULER's tasks in `eval`: what they are made of, opened, and their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from sparseattn.cli.eval_options import EvalOptions
from sparseattn.cli.inputs import open_text
from sparseattn.cli.progress import model_progress
from sparseattn.evaluation.ruler.documents import read_questions
from sparseattn.evaluation.ruler.tasks import ESSAYS, FWE, QA, TEMPLATES, VT, Material, examples
from sparseattn.evaluation.ruler.words import WordLists
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.utils.json_text import JsonError, parse

HAYSTACK = "alice"  # the text that needles lie in where none is given, in place of essays that the package may not ship


def open_filler(name: str) -> tuple[str, str]:
    """Return name and words of a text to hide needles in: a file, a text by name, or RULER's PaulGrahamEssays.json.

    Raises:
        ValueError: as `open_text`; a .json file without a text under "text".
        OSError: as `open_text`.
    """
    called, words = open_text(name)
    if not called.endswith(".json"):
        return called, words
    try:
        content = parse(words, finite=False, once=False)
    except JsonError as error:
        raise ValueError(f"--filler {name}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise ValueError(
            f'--filler {name}: a .json file must have the form {{"text": "..."}}, as RULER\'s PaulGrahamEssays.json'
        )
    return called, content["text"]


def open_material(options: EvalOptions) -> Material | None:
    """Return what the chosen tasks of RULER need, None where none is chosen.

    Raises:
        OSError, ValueError: a file that cannot be had or is none of its kind.
    """
    chosen = [task for task in options.tasks if task in TEMPLATES]
    if not chosen:
        return None
    more_words: Sequence[str] = () if options.ruler_words is None else read_words(options.ruler_words)
    questions = None if options.qa is None else read_questions(options.qa)
    name, text = open_filler(options.filler or HAYSTACK) if set(chosen) & set(ESSAYS) else ("", "")
    lists = None
    if set(chosen) - {VT, FWE, QA}:
        with model_progress() as progress:
            lists = WordLists.read(progress)
    return Material(lists, text, name, more_words, questions)


def read_words(path: Path) -> list[str]:
    """Return the words of a JSON file: a list, or the values of an object, as RULER's english_words.json has them.

    Raises:
        OSError: no such file.
        ValueError: no such JSON.
    """
    try:
        content = parse(path.read_bytes(), finite=False, once=False)
    except JsonError as error:
        raise ValueError(f"--ruler-words {path}: {error}") from None
    words = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"--ruler-words {path} must be a list of words, or an object whose values are words")
    return words


def ruler_prompts(
    task: str, options: EvalOptions, material: Material, engine: Engine, tokens: Tokens
) -> Callable[[], Iterator[Prompt]]:
    """Return what makes the prompts of a task: `--samples` for each length.

    Raises:
        ValueError: naming the option, a length that is too short for the task or too long for the model.
    """

    def of_length(length: int) -> Iterator[Prompt]:
        answer, spare = options.answer_tokens, tokens.spare
        made = examples(
            task, length, material, count=tokens.count, seed=options.ruler_seed, spare=spare, answer_tokens=answer
        )
        for example in islice(made, options.samples):
            yield Prompt.of(example, tokens)

    engine.check(options.prompt_lengths[-1], f"--lengths {options.prompt_lengths[-1]} of {task}, answer and all,")
    if task == QA and material.questions is not None and options.samples > (there := len(material.questions.questions)):
        raise ValueError(
            f"--qa {options.qa} has {there} questions with answers, fewer than --samples {options.samples}"
        )
    for length in dict.fromkeys((options.prompt_lengths[0], options.prompt_lengths[-1])):
        try:
            next(of_length(length))
        except ValueError as error:
            raise ValueError(f"--lengths {length}: {error}") from None

    def make() -> Iterator[Prompt]:
        for length in options.prompt_lengths:
            yield from of_length(length)

    return make
