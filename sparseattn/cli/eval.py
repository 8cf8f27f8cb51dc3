"""`sparseattn eval`: what each method leaves of a model's answers to long prompts, and of its predictions of a text;
and what servers answer to the same prompts."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from sparseattn.cli.eval_engines import addresses, local, served, settings_of_methods, switched
from sparseattn.cli.eval_measure import measured
from sparseattn.cli.eval_options import EngineName, EvalOptions
from sparseattn.cli.eval_prompts import check_before_loading, lines_of
from sparseattn.cli.eval_ranks import held, share
from sparseattn.cli.eval_show import show, write_kvpress
from sparseattn.cli.eval_sources import Files, sources
from sparseattn.cli.results import check_figures, own_folder
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.records import Records, key_of
from sparseattn.evaluation.tasks.scoring import EDITION
from sparseattn.reporting.eval_records import Row
from sparseattn.reporting.eval_tables import marked
from sparseattn.utils.devices import usable_device
from sparseattn.utils.ranks import of_job, of_model


def run(options: EvalOptions) -> None:
    """Run `sparseattn eval`."""
    job = of_job()
    sharing = of_model(job) if options.tensor_parallel else 1
    ranks = None if sharing > 1 else job  # who divide the prompts
    if ranks and (options.endpoint or options.engine is EngineName.vllm):
        raise ValueError(
            f"eval by {ranks.count} processes of torchrun needs the model in each of them: a server or --engine vllm "
            f"answers one process, so start it without torchrun"
        )
    vllm = options.engine is EngineName.vllm
    servers = addresses(options) if options.endpoint else []
    options.check_together()
    settings_in_vllm = settings_of_methods(options) if vllm else []
    check_figures(options.figures)
    files = Files.read(options)
    lines = lines_of(files.prompts) if options.results else {}
    place = usable_device(options.device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(own_folder(options.out, "eval", job))
        checked = not servers and check_before_loading(options.model_name, files.prompts, options)
        if servers or vllm:
            opened = stack.enter_context(served(options, servers) if servers else switched(options, settings_in_vllm))
        else:
            opened = local(options, place, sharing)
        prompts = sources(options, files, opened.engine, opened.tokens, checked and not vllm)
        settings = _settings(options, opened.settings)
        writes = bool(ranks) or not job or job.first
        file = Records(options.out / "eval.jsonl", settings, ranks.rank if ranks else None, writes)
        if job:
            job.meet()  # nobody writes before all have read
        if ranks:
            prompts = held(prompts)
            share(ranks, prompts, opened.engine, file)
            if not ranks.first:
                return
            file.read()
        records = stack.enter_context(contextlib.closing(measured(prompts, opened.engine, file)))
        if not writes:  # the first process has the same records
            deque(records, maxlen=0)
            return
        shown = _shown(records, baseline_of(opened.engine), options.json)
        file.join(map(key_of, shown))
        show(shown, file.path, json=options.json, figures=options.figures)
        if lines:
            write_kvpress(shown, lines, options.out / "kvpress")


def _shown(records: Iterable[dict[str, Any]], baseline: Row, as_json: bool) -> list[dict[str, Any]]:
    """Return records with what the baseline makes of them (`marked`); as JSON they are printed column by column."""
    shown: list[dict[str, Any]] = []
    for _, column in itertools.groupby(records, lambda record: (record["task"], record.get("length"))):
        whole = marked(list(column), baseline)  # what the baseline answers is known once the column is
        shown += whole
        if as_json:
            typer.echo("\n".join(map(json.dumps, whole)))
    return shown


def _settings(options: EvalOptions, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what records of one file share: the engine's settings, and how answers are made and scored."""
    return {
        **engine,
        "chat": options.chat,
        "answer_tokens": options.answer_tokens,
        "scoring": options.scoring,
        "scoring_edition": EDITION,
    }


def baseline_of(engine: Engine) -> Row:
    """Return where the records of what all else is compared with stand in tables."""
    first = engine.passes[0].compared[0]
    return first.label, first.written
