"""Run lm-eval's own command with a model that decodes sparsely."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import DICT_KEYS, EvaluatorConfig
from lm_eval.utils import setup_logging, simple_parse_args_string

from sparseattn.evaluation.harness.model import NAME
from sparseattn.evaluation.harness.processes import spread_responses
from sparseattn.evaluation.harness.report import taken
from sparseattn.evaluation.harness.server import NAME as SERVER
from sparseattn.evaluation.harness.server import refuse_logprobs
from sparseattn.evaluation.harness.settings import SparseSettings
from sparseattn.evaluation.harness.tasks import asking_logprobs, leaves
from sparseattn.models.load import folder_of
from sparseattn.serving.metrics import address_of_metrics
from sparseattn.utils.ranks import JobRanks, job_rank, of_job, of_model
from sparseattn.utils.suggest import did_you_mean

SERVERS = ("local-completions", SERVER)
JOINED = ("model_args", "metadata")  # fields that the file and the command line may both have a part of


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `lm-eval run`, as lm-eval reads them, a `--config` file's among them.

    The command line wins over the file, as it does in lm-eval. It exits, as lm-eval does, where its words are wrong.

    Raises:
        ValueError: naming the file, one that cannot be read or used.
    """
    with _command_line(["lm-eval", "run", *(words[1:] if words[:1] == ["run"] else words)]):
        given = HarnessCLI().parse_args()
    file = _fields_of(given.config) if given.config else {}
    for name, value in file.items():
        asked = getattr(given, name, None)
        if not (asked or asked == 0):  # as lm-eval takes what was given
            setattr(given, name, value)
    given.model = given.model or NAME
    for name in JOINED:
        setattr(given, name, {**(file.get(name) or {}), **(getattr(given, name) or {})})
    return given


def _fields_of(path: str) -> dict[str, Any]:
    """Return the fields of a `--config` file, those in DICT_KEYS as mappings.

    Raises:
        ValueError: naming the file, which cannot be read, or the field of it that lm-eval cannot use.
    """
    try:
        file = EvaluatorConfig.load_yaml_config(path)
    except (FileNotFoundError, TypeError, ValueError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error
    for name in DICT_KEYS:
        if isinstance(file.get(name), str):
            file[name] = simple_parse_args_string(file[name])
    for name, value in file.items():
        if wrong := _wrong(name, value):
            raise ValueError(f"--config {path}: {wrong}")
    return file


def _wrong(name: Any, value: Any) -> str | None:
    """Return what is wrong with a field of a file; None: nothing that would end the run without a sentence."""
    known = [field.name for field in fields(EvaluatorConfig)]
    if name not in known:
        return f"lm-eval has no field {name!r}{did_you_mean(name, known)}: there are {', '.join(known)}"
    if value is None:
        return None
    if name in (*DICT_KEYS, "cache_requests") and not isinstance(value, dict):
        return f"{name} must be a mapping, such as {{name: value}}, got {value!r}"
    if name == "use_cache" and not (isinstance(value, str) and value):
        return f"use_cache must be the path of a file, got {value!r}"
    names = [value] if isinstance(value, str) else value
    if name == "tasks" and not (isinstance(names, list) and all(isinstance(task, str) for task in names)):
        return f"tasks must be names, such as [hellaswag, arc_easy], got {value!r}"
    return None


def run(given: argparse.Namespace, settings: SparseSettings, sharing: bool = False) -> dict[str, Any] | None:
    """Run lm-eval, and return what ran, as its results have it; None in all processes but the first.

    Args:
        given: lm-eval's arguments.
        settings: how to decode.
        sharing: whether the processes of torchrun share the model's heads; else they divide the documents.

    Raises:
        ValueError: another model than ours, settings that do not fit, or a run of which no step was sparse.
    """
    ranks = of_job()
    if given.model in SERVERS:
        _check_alone(ranks)
        return _run_server(given, settings)
    if given.model != NAME:
        raise ValueError(
            f"--model is {NAME}, which decodes sparsely here, or {SERVERS[0]}, a server of `sparseattn serve`, got "
            f"{given.model}"
        )
    if not given.model_args.get("pretrained"):
        raise ValueError("--model_args needs pretrained=MODEL, such as pretrained=smollm2")
    if twice := sorted(given.model_args.keys() & {setting.name for setting in fields(settings)}):
        raise ValueError(f"{', '.join(twice)} are options of this command, and not of --model_args")
    folder = folder_of(str(given.model_args["pretrained"]))
    shared = {"tp_plan": "auto"} if sharing and of_model(ranks) > 1 else {}
    # Tasks that make their prompts, such as RULER's, count them by this tokenizer.
    given.metadata = {"tokenizer": folder, **given.metadata}
    if given.use_cache:  # lm-eval finds responses by their prompt alone, whoever gave them
        given.use_cache = f"{given.use_cache}-{settings.digest({**given.model_args, 'pretrained': folder})}"
        spread_responses(given.use_cache, ranks, sharing)
    given.model_args = {**given.model_args, **settings.given(), **shared}
    if any(pattern != "*" for pattern, _ in settings.tails.fixed):
        _check_tails(given, settings)
    return _launched(given)


def _check_tails(given: argparse.Namespace, settings: SparseSettings) -> None:
    """ValueError for a task of `--tail` that is not asked."""
    with _in_a_sentence():
        config = EvaluatorConfig.from_cli(given)
        manager = config.process_tasks(config.metadata)
    names = list(dict.fromkeys(leaves(manager.task_index, config.tasks)))
    if unused := settings.tails.unused(names):
        raise ValueError(
            f"--tail names {', '.join(unused)}, and no task here is called so: there are {', '.join(names)}"
        )


def _check_alone(ranks: JobRanks | None) -> None:
    """ValueError for several processes that would ask a server the same."""
    if ranks:
        raise ValueError(
            f"a server answers one process, and torchrun has started {ranks.count}: start lm-eval without torchrun, "
            f"and let it ask several at once (num_concurrent in --model_args)"
        )


def _run_server(given: argparse.Namespace, settings: SparseSettings) -> dict[str, Any] | None:
    """Ask a server.

    Raises:
        ValueError: settings of ours, tasks that ask for log-probabilities, or a server that does not count.
    """
    if ours := ", ".join(f"--{name.replace('_', '-')}" for name in settings.given()):
        raise ValueError(f"a server decodes as it was started: give {ours} to `sparseattn serve`, and not here")
    if given.use_cache:
        raise ValueError(
            "--use_cache keeps responses by their prompt, and another server, or this one started otherwise, would be "
            "given the same ones: leave it out where a server answers"
        )
    if not given.model_args.get("base_url"):
        raise ValueError("--model_args needs base_url=URL, such as base_url=http://127.0.0.1:8000/v1/completions")
    address_of_metrics(str(given.model_args["base_url"]))
    with _in_a_sentence():
        config = EvaluatorConfig.from_cli(given)
        manager = config.process_tasks(config.metadata)
    refuse_logprobs(asking_logprobs(manager, config.tasks))
    given.model = SERVER
    return _launched(given)


def _launched(given: argparse.Namespace) -> dict[str, Any] | None:
    """Run lm-eval, and return what it says of what ran; None where another process says it."""
    setup_logging(*(["ERROR"] if job_rank() else []))
    taken()
    with _in_a_sentence():
        given.func(given)
    return None if job_rank() else taken()[0]


@contextlib.contextmanager
def _in_a_sentence() -> Iterator[None]:
    """Turn what lm-eval says of wrong arguments, by an error with a traceback, into one of ours."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
        if not where.startswith(("lm_eval.config", "lm_eval._cli", "lm_eval.evaluator", "lm_eval.tasks")):
            raise
        raise ValueError(f"lm-eval: {error}") from error


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Let lm-eval's parser, which reads the process's command line, read this one."""
    before = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = before
