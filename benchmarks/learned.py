"""Learned indexes beside product codes at equal bytes: trained on some texts, judged on others.

``python -m benchmarks.learned FOLDER --train alice,click --judge nltk`` from the repository root reads
FOLDER/NAME.safetensors of each text and writes ``benchmarks/results/learned.json``. Equal bytes are those of a token's
code: 2, 4 and 8.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import records, replayed
from sparseattn.cli.progress import progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.replay import evaluate
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace
from sparseattn.training import CodesRecipe, IndexRecipe, train_codes, train_index

NAME = "learned.json"
BYTES = (2, 4, 8)  # of a token's code
Train = Callable[[list[Path], Path], object]


@dataclass(frozen=True)
class Way:
    """A method at some bytes a token: what trains its file, if it has one, and how it is named without and with it."""

    words: str
    size: int
    spec: str
    train: Train | None = None

    def selector(self, file: Path) -> str:
        """Return the text of the selector that reads a file."""
        joined = "," if ":" in self.spec else ":"
        return self.spec if self.train is None else f"{self.spec}{joined}artefact={file}"


def ways(steps: int, head_dim: int, seal: int) -> list[Way]:
    """Return every method that is compared.

    A block of SeerAttention's gate has a key of 16 bits a channel, so at `size` bytes a row it has `2 D / size` rows.
    Blocks of more rows than are sealed at once are left out: more would wait densely.
    """
    found = [Way("the true order", 0, "exact:group=softmax")]
    for size in BYTES:
        bits, parts = 8 * size, 2 * size
        found += [
            Way("querypq, of each prompt", size, f"querypq:subspaces={parts},missed=0"),
            Way("querypq, of each prompt, plain mean", size, f"querypq:subspaces={parts},mean=plain"),
            Way("querypq, of other texts", size, f"querypq:subspaces={parts}", _codes(parts, 0)),
            Way("querypq, of other texts, plain mean", size, f"querypq:subspaces={parts}", _codes(parts, 0, "plain")),
            Way("querypq, of other texts, distilled", size, f"querypq:subspaces={parts}", _codes(parts, steps)),
            Way("hata", size, f"hata:bits={bits}", _index(IndexRecipe("hata", bits, steps=steps))),
            Way("hata, by its own loss", size, f"hata:bits={bits}", _index(IndexRecipe("hata", bits, "hata", steps))),
            Way("hata, random directions", size, f"hata:bits={bits}"),
            Way(
                "hashattention",
                size,
                f"hashattention:bits={bits}",
                _index(IndexRecipe("hashattention", bits, steps=steps)),
            ),
            Way("indexer", size, f"indexer:dimensions={parts}", _index(IndexRecipe("indexer", parts, steps=steps))),
        ]
        page = 2 * head_dim // size
        if seal % page == 0:
            found.append(Way("seer", size, f"seer:page={page}", _index(IndexRecipe("seer", page, steps=steps))))
    return found


def _codes(parts: int, steps: int, mean: str = "rope") -> Train:
    return lambda traces, out: train_codes(traces, out, CodesRecipe(parts, distil=steps, ahead=0, mean=mean))


def _index(recipe: IndexRecipe) -> Train:
    return lambda traces, out: train_index(traces, out, recipe)


def measured(options: argparse.Namespace, way: Way, folder: Path) -> list[dict[str, Any]]:
    """Return what a method recovers on each text."""
    file = folder / "index.safetensors"
    if way.train is not None:
        way.train([_file(options, name) for name in options.train.split(",")], file)
    rows = []
    for name in options.judge.split(","):
        found = evaluate(
            Trace.open(_file(options, name)),
            make_selector(way.selector(file)),
            options.budget,
            **replayed.settings(options),
        )
        shares = {"recovered": found.mean("recovered"), "worst": found.worst("recovered")}
        rows.append({"method": way.words, "bytes": way.size, "text": name, **shares})
    file.unlink(missing_ok=True)
    return rows


def _file(options: argparse.Namespace, name: str) -> Path:
    return Path(options.folder) / f"{name}.safetensors"


def table(record: Any) -> Iterable[Table]:
    texts = list(dict.fromkeys(row["text"] for row in record["results"]))
    out = Table("method", "bytes", *texts)
    for method, size in dict.fromkeys((row["method"], row["bytes"]) for row in record["results"]):
        same = [row for row in record["results"] if (row["method"], row["bytes"]) == (method, size)]
        out.add_row(method, str(size or ""), *(f"{row['recovered']:.2f}" for row in same))
    yield out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.learned", description="Learned indexes at equal bytes.")
    out.add_argument("folder", help="of captured keys and queries, NAME.safetensors for each text")
    out.add_argument("--train", required=True, help="texts to train on, with commas")
    out.add_argument("--judge", required=True, help="texts to judge on, with commas")
    out.add_argument("--steps", type=int, default=300, help="of each layer")
    out.add_argument("--budget", type=int, default=256)
    replayed.add_options(out)
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    missing = [name for name in f"{options.train},{options.judge}".split(",") if not _file(options, name).is_file()]
    if missing:
        command.error(f"{options.folder} has no {', '.join(f'{name}.safetensors' for name in missing)}")
    if both := set(options.train.split(",")) & set(options.judge.split(",")):
        command.error(f"a text that was trained on judges nothing, got {', '.join(sorted(both))} in both")
    results: list[dict[str, Any]] = []
    trace = Trace.open(_file(options, options.judge.split(",")[0]))
    every = ways(options.steps, trace.shapes[trace.layers[0]].size, options.seal)
    with tempfile.TemporaryDirectory() as folder, progress_bar() as bar:
        task = bar.add_task("learned", total=len(every))
        for way in every:
            results += measured(options, way, Path(folder))
            bar.advance(task)
    record = {
        "question": "what learned indexes find beside product codes at equal bytes",
        "model": trace.meta.get("model"),
        "tokens": trace.tokens,
        "layers": list(trace.layers),
        **{name: getattr(options, name) for name in ("train", "judge", "steps", "budget", *replayed.SETTINGS)},
        "versions": versions(),
        "machine": machine(),
        "results": results,
    }
    records.end(record, NAME, table, options)


if __name__ == "__main__":
    main()
