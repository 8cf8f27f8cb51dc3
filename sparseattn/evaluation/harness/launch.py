"""Run lm-eval's own command with a model that decodes sparsely."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.utils import setup_logging, simple_parse_args_string

from sparseattn.evaluation.harness.model import NAME
from sparseattn.evaluation.harness.report import taken
from sparseattn.evaluation.harness.settings import SparseSettings
from sparseattn.models.load import folder_of


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `lm-eval run`, as lm-eval reads them, a `--config` file's among them.

    It exits, as lm-eval does, where they are wrong.
    """
    with _command_line(["lm-eval", "run", *(words[1:] if words[:1] == ["run"] else words)]):
        given = HarnessCLI().parse_args()
    file = EvaluatorConfig.load_yaml_config(given.config) if given.config else {}
    given.model = given.model or file.get("model") or NAME
    for name in ("model_args", "metadata"):
        of_file = file.get(name) or {}
        of_file = simple_parse_args_string(of_file) if isinstance(of_file, str) else of_file
        setattr(given, name, {**of_file, **(getattr(given, name) or {})})
    return given


def run(given: argparse.Namespace, settings: SparseSettings) -> dict[str, Any]:
    """Run lm-eval, and return what ran, as its results have it.

    Args:
        given: lm-eval's arguments.
        settings: how to decode.

    Raises:
        ValueError: another model than ours, settings that do not fit, or a run of which no step was sparse.
    """
    if given.model != NAME:
        raise ValueError(f"--model is {NAME}, which decodes sparsely, got {given.model}")
    if not given.model_args.get("pretrained"):
        raise ValueError("--model_args needs pretrained=MODEL, such as pretrained=smollm2")
    if twice := sorted(given.model_args.keys() & {one.name for one in fields(settings)}):
        raise ValueError(f"{', '.join(twice)} are options of this command, and not of --model_args")
    folder = folder_of(str(given.model_args["pretrained"]))
    # Tasks that make their prompts, such as RULER's, count them by this tokenizer.
    given.metadata = {"tokenizer": folder, **given.metadata}
    given.model_args = {**given.model_args, **settings.given()}
    setup_logging()
    given.func(given)
    (record,) = taken()
    return record


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Let lm-eval's parser, which reads the process's command line, read this one."""
    before = sys.argv
    sys.argv = words
    try:
        yield
    finally:
        sys.argv = before
