"""`sparseattn eval`: what each method leaves of a model's answers to long prompts, and of its predictions of a text."""

from __future__ import annotations

import datetime
import functools
import json as json_module
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparseattn.budget import budget_rows, parse_budget
from sparseattn.cli import eval_report as report
from sparseattn.cli.common import (
    MODEL_HELP,
    SELECTOR_HELP,
    decimals,
    errors,
    in_a_sentence,
    integers,
    progress_bar,
    results_folder,
)
from sparseattn.cli.report import budget_label
from sparseattn.devices import usable_device
from sparseattn.dtypes import STORED
from sparseattn.environment import machine, versions
from sparseattn.integrations.models import REFERENCE, load_model
from sparseattn.selectors import make_selector
from sparseattn.tasks import TASKS, Example, Filler, example
from sparseattn.tasks.decoder import ModelDecoder
from sparseattn.tasks.filler import from_text, made_up
from sparseattn.tasks.prompts import TAIL, TEMPLATE, read_prompts, read_text
from sparseattn.tasks.records import Records
from sparseattn.tasks.run import PROTOCOLS, Method, Prompt, measure
from sparseattn.tasks.scoring import SCORINGS
from sparseattn.tasks.tokens import Tokens

SELECTED = ("exact", "quest", "random", "window")
PPL = "ppl"
OWN_TOKENS = 64  # of an answer to a prompt of the user's


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


@in_a_sentence
def evaluate(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = REFERENCE,
    task: Annotated[
        str | None,
        typer.Option(
            help=f"Of {', '.join(TASKS)}, and {PPL}, the perplexity of --text; several with commas. "
            f"Default: passkey,kv, or none where --prompts are given."
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, or of a window of --text.")] = "1024,4096",
    depths: Annotated[str, typer.Option(help="Where the needle lies: 0 is the beginning, 1 the end.")] = "0,0.5,1",
    samples: Annotated[int, typer.Option(help="Prompts for each length and depth, or windows of --text.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the first prompt; the next ones count on.")] = 0,
    selector: Annotated[
        list[str] | None,
        typer.Option(help=f"{SELECTOR_HELP} Default: {' '.join(SELECTED)}. Full attention is measured beside them."),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Rows beyond sink and window: numbers, shares of the context, or all.")
    ] = "64,256,1024",
    protocol: Annotated[
        str,
        typer.Option(
            help="question: the question's tokens go through the sparse path, one by one, and then the answer's. "
            "prefill: the question is read densely too, all but its last token. Both with a comma."
        ),
    ] = "question",
    dense_layers: Annotated[int, typer.Option(help="First layers that stay dense (Quest's paper: 2).")] = 0,
    sink: Annotated[int, typer.Option(help="First rows that every query reads.")] = 4,
    window: Annotated[int, typer.Option(help="Last rows that every query reads.")] = 64,
    seal: Annotated[
        int | None,
        typer.Option(
            help="Rows that wait, all of them read, before sealing; default the selector's span, since more flatters."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help=f"Text file for {PPL}.")] = None,
    last: Annotated[int, typer.Option(help=f"Tokens at the end of each window that {PPL} predicts.")] = 256,
    filler: Annotated[Path | None, typer.Option(help="Text to hide needles in. Default: made-up sentences.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON Lines of your own prompts: prompt, or context and question, and answers; the names of fields in "
            "LongBench, RULER and InfiniteBench are understood. Repeat for more."
        ),
    ] = None,
    scoring: Annotated[
        str,
        typer.Option(
            help="Of --prompts. all: share of the answers found; part: any found; exact: nothing but an answer; f1: "
            "words shared with the nearest."
        ),
    ] = "all",
    template: Annotated[
        str, typer.Option(help="How --prompts with a context and a question are written; \\n is a line's end.")
    ] = TEMPLATE.replace("\n", "\\n"),
    tail: Annotated[
        int, typer.Option(help="Characters at the end of a whole prompt that count as its question.")
    ] = TAIL,
    answer_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of an answer at most. Default: twice the right answers' and 8; with --prompts 64."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Longer --prompts lose the middle of their context, as in LongBench. Default: what is too long for "
            "the model is refused."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    dtype: Annotated[str | None, typer.Option(help=f"Of the model: {', '.join(STORED)}; as stored by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default a GPU if there is one.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per forward call of the prefill.")] = 2048,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records, eval.jsonl, and the figures; what is there already is not measured again."
        ),
    ] = Path("eval"),
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of tables.")] = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNGs into --out.")] = True,
) -> None:
    """Ask a model about long prompts, with full attention and with every selector and budget, and score its answers.

    A prompt is read once; every method goes on from there. Interrupt it as you like: the same command goes on.
    """
    names = _names(task or ("" if prompts else "passkey,kv"), "--task", (*TASKS, PPL))
    protocols = _names(protocol, "--protocol", PROTOCOLS)
    counts = sorted(set(integers(lengths, "--lengths") or []))
    places = list(dict.fromkeys(decimals(depths, "--depths")))
    for option, name, known in (("--scoring", scoring, SCORINGS), ("--dtype", dtype, STORED)):
        if name is not None and name not in known:
            raise ValueError(f"{option} is one of {', '.join(known)}, got {name!r}")
    numbers = {
        "--lengths": counts[0],
        "--samples": samples,
        "--last": last,
        "--chunk": chunk,
        "--seal": seal,
        "--answer-tokens": answer_tokens,
        "--max-length": max_length,
    }
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{option} is 1 or more, got {number}")
    if (text is None) == (PPL in names):
        raise ValueError(f"--task {PPL} and --text FILE go together")
    methods = _methods(selector or SELECTED, budget, counts)
    if figures:
        from sparseattn.cli import plots  # fails at once if matplotlib is missing, before any work
    layout = template.replace("\\n", "\n")
    written = [read_prompts(path, scoring, layout, tail) for path in dict.fromkeys(prompts or [])]
    sentences = made_up if filler is None else from_text(read_text(filler))
    passage = None if text is None else read_text(text)
    place = usable_device(device)
    results_folder(out)

    loaded, tokenizer = load_model(model, None if dtype is None else STORED[dtype], place)
    tokens = Tokens(tokenizer, chat)
    decoder = ModelDecoder(
        loaded,
        sink=sink,
        window=window,
        dense_layers=dense_layers,
        seal=seal,
        chunk=chunk,
        queries=any(method.selector is not None and method.selector.queries_share for method in methods),
    )
    seeds = range(seed, seed + samples)
    sources = [
        _generated(name, counts, places, seeds, sentences, decoder, tokens, answer_tokens)
        for name in names
        if name != PPL
    ]
    sources += [_own(examples, decoder, tokens, answer_tokens or OWN_TOKENS, max_length) for examples in written]
    if text is not None and passage is not None:
        decoder.check(counts[-1], "--lengths")
        sources.append(_passages(text.name, passage, tokens, counts, samples, last))
    settings = {
        "model": model,
        "weights": decoder.fingerprint(),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "sink": sink,
        "window": window,
        "dense_layers": dense_layers,
        "seal": seal,
        "chat": chat,
        "answer_tokens": answer_tokens,
        "scoring": scoring,
    }
    records = Records(out / "eval.jsonl", settings)
    made_by = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    found: list[dict[str, Any]] = []
    for record in _measure(sources, methods, protocols, decoder, tokens, records, made_by):
        found.append(record)
        if json:
            typer.echo(json_module.dumps(record))

    if not json:
        screen = Console(highlight=False, width=None if sys.stdout.isatty() else report.WIDE)
        for table in report.tables(found):
            screen.print(table)
    if figures:
        plots.accuracy(found, out / "accuracy.png")
        errors.print(f"figure: {out / 'accuracy.png'}", soft_wrap=True)
        for name, mine in report.grids(found).items():
            plots.heat(mine, out / f"heat-{name}.png")
            errors.print(f"figure: {out / f'heat-{name}.png'}", soft_wrap=True)
    errors.print(f"records: {records.path}", soft_wrap=True)
    for line in report.verdicts(found):
        (errors if json else Console(highlight=False)).print(line, soft_wrap=True)


def _names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """`"a,b"` as a list without repetitions. Raises ValueError for a name that is not among `known`."""
    names = list(dict.fromkeys(text.split(","))) if text else []
    for name in names:
        if name not in known:
            raise ValueError(f"{option} takes names from {', '.join(known)}, separated by commas, got {name!r}")
    return names


def _methods(specs: Sequence[str], text: str, counts: Sequence[int]) -> list[Method]:
    """Full attention, and every selector at every budget; one that does not look at its budget, once."""
    asked = list(dict.fromkeys(parse_budget(part) for part in text.split(",")))
    asked.sort(key=lambda budget: budget_rows(budget, counts[-1]))
    methods = [Method()]
    labels: dict[str, str] = {}
    for one in map(make_selector, specs):
        what = f"{one!r} of {one.source()}"
        if labels.setdefault(one.label(), what) != what:
            raise ValueError(f"two selectors are called {one.label()}: {labels[one.label()]} and {what}")
        for budget in asked if one.uses_budget else [None]:
            budget_rows(budget, counts[0], one.span, repr(one))
            methods.append(Method(one, budget, budget_label(budget) if one.uses_budget else None))
    return list({(method.label, method.written): method for method in methods}.values())


def _generated(
    name: str,
    counts: Sequence[int],
    places: Sequence[float],
    seeds: Sequence[int],
    filler: Filler,
    decoder: ModelDecoder,
    tokens: Tokens,
    limit: int | None,
) -> Source:
    """A task over the grid of lengths and depths; lengths too short for it or too long for the model are refused."""
    depths = list(places) if TASKS[name].uses_depth else [0.0]
    make_one = functools.partial(example, name, count=tokens.count, filler=filler, spare=tokens.spare)
    for depth in depths:
        shortest = Prompt.of(make_one(counts[0], depth, seeds[0]), tokens, limit)
        decoder.check(counts[-1] + shortest.limit, f"--lengths {counts[-1]} with an answer of {shortest.limit} tokens")

    def make() -> Iterator[Prompt]:
        for length in counts:
            for depth in depths:
                for seed in seeds:
                    yield Prompt.of(make_one(length, depth, seed), tokens, limit)

    return Source(name, len(counts) * len(depths) * len(seeds), make)


def _own(examples: Sequence[Example], decoder: ModelDecoder, tokens: Tokens, limit: int, longest: int | None) -> Source:
    """A file of the user's; one too long for the model is refused before any is asked."""

    def make() -> Iterator[Prompt]:
        for one in examples:
            prompt = Prompt.of(one, tokens, limit)
            prompt = prompt if longest is None else prompt.shortened(longest)
            decoder.check(prompt.tokens + limit, f"{prompt.name} with its answer")
            yield prompt

    for _ in make():  # not kept: lists of a million tokens take more memory than tokenizing twice takes time
        pass
    return Source(examples[0].task, len(examples), make)


def _passages(name: str, text: str, tokens: Tokens, counts: Sequence[int], samples: int, last: int) -> Source:
    """Windows of a text, evenly spread over it."""
    ids = tokens.ids(text)
    spare = len(tokens.start)
    if counts[0] < last + 2:
        raise ValueError(f"a window of --lengths {counts[0]} tokens does not hold --last {last} and 2 before them")
    if len(ids) < counts[-1]:
        raise ValueError(f"{name} has {len(ids)} tokens, fewer than --lengths {counts[-1]}")

    starts = {
        length: sorted({round(i * (len(ids) + spare - length) / max(samples - 1, 1)) for i in range(samples)})
        for length in counts
    }

    def make() -> Iterator[Prompt]:
        for length, places in starts.items():
            for start in places:
                facts = {"task": PPL, "file": name, "length": length, "start": start}
                yield Prompt.passage(facts, [*tokens.start, *ids[start : start + length - spare]], last)

    return Source(PPL, sum(map(len, starts.values())), make)


def _measure(
    sources: Sequence[Source],
    methods: Sequence[Method],
    protocols: Sequence[str],
    decoder: ModelDecoder,
    tokens: Tokens,
    records: Records,
    made_by: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Every record that was asked for, those that were there already among them, with a progress bar."""
    cells = len(methods) * sum(source.count * (1 if source.task == PPL else len(protocols)) for source in sources)
    with progress_bar() as bar:
        task = bar.add_task("", total=cells)
        for source in sources:
            for number, prompt in enumerate(source.make(), 1):
                bar.update(task, description=f"{source.task} {number}/{source.count}, {prompt.tokens:,} tokens")
                keys = prompt.keys(protocols, methods)
                missing = [key for key in keys if key not in records.found]
                bar.advance(task, len(keys) - len(missing))
                if missing:
                    for record in measure(prompt, methods, protocols, decoder, tokens, records.found, decoder.ends):
                        records.add({**record, **made_by})
                        bar.advance(task)
                yield from (records.found[key] for key in keys)
