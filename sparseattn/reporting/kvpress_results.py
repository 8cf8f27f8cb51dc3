"""Results in the form of kvpress' evaluation and leaderboard (https://github.com/NVIDIA/kvpress): a folder a run, with
`predictions.csv`, `metrics.json` and `config.yaml`.

A run there is one data set, one press and one ratio of compression; here it is one data set, one method and one budget.
The ratio is the share of stored rows that a query did not read, on average.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting.eval_records import Record, Row, by, in_words, mean, mean_of, rows_of, select
from sparseattn.utils.files import write_atomic

ONE_TASK = ("longbench", "longbench-e", "infinitebench")  # whose tasks are configurations of their own: a run each
LENGTHS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, None)}  # of LongBench-E


@dataclass(frozen=True)
class KvpressRun:
    """One data set, method and budget.

    Args:
        data_set: as kvpress calls it.
        part: the task or length that `data_dir` names there; None: nothing says it.
        protocol: of the records.
        row: method and budget.
        records: of `eval`.
        lines: of each record, the line that its prompt was read from.
    """

    data_set: str
    part: str | None
    protocol: str
    row: Row
    records: Sequence[Record]
    lines: Sequence[Mapping[str, Any]]

    @property
    def ratio(self) -> float:
        """The share of rows that a query did not read, on average over the prompts."""
        return mean(map(ratio_of, self.records))

    @property
    def press(self) -> str:
        """The name of the press: of full attention the one that kvpress has for none."""
        return "no_press" if self.row[0] == FULL else re.sub(r"[^\w.,=-]+", "-", "_".join(filter(None, self.row)))

    @property
    def folder(self) -> str:
        """The name of its folder, of the parts that kvpress joins; a protocol that kvpress does not have is added."""
        model = str(self.records[0]["settings"]["model"]).replace("/", "--")
        parts = [self.data_set, self.part or "", model, self.press, f"{self.ratio:.2f}"]
        parts += [] if self.protocol == "question" else [self.protocol]
        return "__".join(filter(None, parts))


def ratio_of(record: Record) -> float:
    """Return the share of stored rows that a query did not read.

    Raises:
        ValueError: a record that does not say, as of a server.
    """
    if "rows_share" in record:
        return 1.0 - float(record["rows_share"])
    if "context" not in record:
        raise ValueError("kvpress' form needs the rows that were read, which a server does not say")
    return 0.0 if record["method"] == FULL else 1.0 - record["rows"] / record["context"]


def runs(records: Sequence[Record], lines: Mapping[tuple[str, int], Mapping[str, Any]]) -> list[KvpressRun]:
    """Return the runs that records are of.

    Args:
        records: of prompts of the layout kvpress; others are left out.
        lines: by the file's name and the line's number, what was read there.
    """
    made = []
    mine = [record for record in records if record.get("layout") == "kvpress"]
    for data_set, of_set in by(mine, "data_set").items():
        groups = by(of_set, "task") if data_set in ONE_TASK else {None: of_set}
        for task, of_task in groups.items():
            part = task.partition("/")[2] if task else _length(of_task)
            for protocol, of_protocol in by(of_task, "protocol").items():
                for row in rows_of(of_protocol):
                    chosen = select(of_protocol, row)
                    read = [lines[record["file"], record["line"]] for record in chosen]
                    made.append(KvpressRun(data_set, part, protocol, row, chosen, read))
    return made


def write(folder: Path, runs: Sequence[KvpressRun]) -> list[Path]:
    """Write runs into folders of their own and return these. A run of the same name takes the place of an older one.

    Raises:
        OSError: a folder cannot be written.
    """
    made = []
    for run in runs:
        place = folder / run.folder
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / "predictions.csv", predictions(run).encode())
        write_atomic(place / "metrics.json", json.dumps(metrics(run), indent=4, allow_nan=False).encode())
        write_atomic(place / "config.yaml", config(run, folder).encode())
        made.append(place)
    return made


def predictions(run: KvpressRun) -> str:
    """Return the columns of every line but the context, with `predicted_answer` and `compression_ratio`, as CSV."""
    names = list(dict.fromkeys(name for line in run.lines for name in line))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "predicted_answer", "compression_ratio"])
    for record, line in zip(run.records, run.lines, strict=True):
        writer.writerow([*(line.get(name) for name in names), record["response"], ratio_of(record)])
    return out.getvalue()


def metrics(run: KvpressRun) -> Any:
    """Return what kvpress' scorer of the data set gives: percent of RULER and LongBench, shares of the others."""
    if run.data_set == "ruler":
        pairs = zip(run.records, run.lines, strict=True)
        tasks = by([{**record, "name": line["task"]} for record, line in pairs], "name")
        return {name: {"string_match": _percent(tasks[name])} for name in sorted(tasks)}
    if run.data_set == "longbench":
        return _percent(run.records)
    if run.data_set == "longbench-e":
        return {
            name: _percent(
                [record for record, line in zip(run.records, run.lines, strict=True) if _within(line, *ends)]
            )
            for name, ends in LENGTHS.items()
        }
    if run.data_set == "infinitebench":
        return mean_of(run.records, "score")
    grouped: dict[str, list[Record]] = {}
    for field in ("difficulty", "length"):
        said = [None if line.get(field) is None else str(line[field]) for line in run.lines]
        for value in sorted({value for value in said if value is not None}):
            grouped[value] = [record for record, own in zip(run.records, said, strict=True) if own == value]
    return {"average": mean_of(run.records, "score"), **{name: mean_of(of, "score") for name, of in grouped.items()}}


def config(run: KvpressRun, folder: Path) -> str:
    """Return the settings of kvpress' evaluation as YAML; those that sparse decoding does not have are null."""
    settings = run.records[0]["settings"]
    zones = ", ".join(f"{name} {settings[name]}" for name in ("sink", "window", "dense_layers") if name in settings)
    spec = run.records[0].get("selector") or FULL
    values: dict[str, Any] = {
        "dataset": run.data_set,
        "data_dir": run.part,
        "model": settings["model"],
        "device": None,
        "press_name": run.press,
        "compression_ratio": run.ratio,
        "key_channel_compression_ratio": None,
        "fraction": 1.0,
        "max_new_tokens": settings.get("answer_tokens"),
        "max_context_length": None,
        "query_aware": False,
        "needle_depth": None,
        "compression_interval": None,
        "target_size": None,
        "hidden_states_buffer_size": None,
        "output_dir": str(folder),
        "log_level": "INFO",
        "model_kwargs": {},
        "press_init_command": f"sparseattn: {in_words((spec, run.row[1]))}, {zones}, protocol {run.protocol}",
        "seed": 42,
        "fp8": False,
    }
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())  # JSON is YAML


def _percent(records: Sequence[Record]) -> float | None:
    """Return the mean score as kvpress rounds it; None of no record, where its code has NaN."""
    return round(100 * mean_of(records, "score"), 2) if records else None


def _within(line: Mapping[str, Any], least: int, below: int | None) -> bool:
    return line["length"] >= least and (below is None or line["length"] < below)


def _length(records: Sequence[Record]) -> str | None:
    """Return the number that the file or its folder is called after, as RULER's lengths are; None: none is."""
    names = {Path(record["file"]).name.partition(".")[0].partition("-")[0] for record in records}
    name = names.pop() if len(names) == 1 else ""
    return name if name.isdecimal() else None
