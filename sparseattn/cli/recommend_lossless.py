"""`sparseattn recommend --lossless`: how to draft for full attention's tokens, by tokens a second."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import typer

from sparseattn.cli import options as shared
from sparseattn.cli.inputs import open_model, open_texts
from sparseattn.cli.progress import progress_bar
from sparseattn.cli.recommend_options import RecommendOptions
from sparseattn.cost_model.environment import machine
from sparseattn.evaluation.tasks.decoder import check_positions
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.input_device import input_device
from sparseattn.models.sparse_cache import SINK, WINDOW, restore
from sparseattn.recommend.defaults import DRAFT_METHODS
from sparseattn.recommend.lossless import GAIN, DraftChoice, DraftTrial, chosen, measured
from sparseattn.recommend.windows import windows
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import Screen, table_screen
from sparseattn.utils.files import write_atomic


def run(options: RecommendOptions) -> None:
    """Measure, print the table and the choice, and write `lossless.json` to the folder of --out."""
    texts = open_texts(options.text)
    model, tokenizer = open_model(options.model, shared.torch_dtype(options.dtype), options.place)
    tokens = Tokens(tokenizer)
    every = windows(
        [(text.name, text.kind, tokens.ids(text.words)) for text in texts],
        tokens.start,
        options.length,
        options.last,
        options.windows,
        0,
    )
    prompts = [torch.tensor([window.prompt.context], device=input_device(model)) for window in every]
    trial = DraftTrial(
        options.selector or DRAFT_METHODS,
        options.budgets,
        options.draft_numbers,
        options.last,
        options.sink,
        options.window,
        options.chunk,
    )
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = trial.room(prompts[0].shape[1])
    check_positions(positions, room, f"--length {options.length} with all drafts behind it")
    try:
        with progress_bar() as bar:
            task = bar.add_task("drafts", total=len(prompts) * len(trial.caches))
            choices = measured(model, prompts, trial, lambda: bar.advance(task))
    finally:
        restore(model)
    best = chosen(choices)
    record = {
        "question": "tokens a second of lossless generation",
        "model": options.model,
        "texts": [text.name for text in texts],
        "length": options.length,
        "windows": len(prompts),
        "tokens": options.last,
        "sink": options.sink,
        "window": options.window,
        "chunk": options.chunk,
        "dtype": str(model.dtype).removeprefix("torch."),
        "chosen": best.record(),
        "choices": [choice.record() for choice in choices],
        "machine": machine(),
    }
    write_atomic(options.out / "lossless.json", (json.dumps(record, indent=1) + "\n").encode())
    if options.json:
        typer.echo(json.dumps(record))
        return
    table_screen().print(_table(choices))
    Screen().print(_sentence(best, options.sink, options.window), soft_wrap=True)


def _table(choices: Sequence[DraftChoice]) -> Table:
    columns = [Column.text("draft"), Column.text("budget"), Column("drafts"), Column.text("choices")]
    columns += [Column("tokens/s", "{:.1f}".format), Column("to plain steps", "{:.2f}".format)]
    columns += [Column("accepted", "{:.0%}".format)]
    table = Table("Tokens of full attention, by draft", columns, row_head=0)
    for choice in choices:
        drafted = ["none", None, 0, None]
        if choice.drafts:
            choices_of = "one a round" if choice.choose_once else "each draft"
            drafted = [choice.selector, choice.written, choice.drafts, choices_of]
        table.add(*drafted, choice.tokens_a_second, choice.to_plain, choice.acceptance)
    return table


def _sentence(best: DraftChoice, sink: int, window: int) -> str:
    if not best.drafts:
        return f"No draft is {GAIN:g} times as fast as plain steps of full attention here: leave drafts out (draft=0)."
    once = ", choose_once=True" if best.choose_once else ""
    zones = (("sink", sink, SINK), ("window", window, WINDOW))
    unusual = {name: rows for name, rows, usual in zones if rows != usual}
    settings = f", settings={json.dumps(unusual)}" if unusual else ""
    return (
        f'Fastest: generate_lossless(model, ids, "{best.selector}", {best.budget!r}, draft={best.drafts}{once}'
        f"{settings}), "
        f"{best.to_plain:.2f} times as fast as plain steps of full attention"
    )
