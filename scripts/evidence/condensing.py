"""Makes a small record of what a command left: settings that all lines share once, and a row a measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from scripts.evidence.step import Step
from sparseattn.utils.files import write_atomic

Line: TypeAlias = "dict[str, Any]"

ONCE = ("date", "versions", "machine")  # of a run, not of a measurement
BY_LAYER = "by-layer.jsonl"  # what `bench --by-layer` leaves beside its own lines
LISTED = ("records", "by_layer")  # of a record, with a line of its file for each entry
DIGITS = 5  # that a measurement keeps


def keep(step: Step, folder: Path, path: Path, seconds: float | None = None) -> None:
    """Puts the record of a step at `path`: the file that its command left there, or what its lines say.

    `seconds` are what the command took.

    Raises:
        ValueError: the lines are none, or none of a known command; the file is no finished record.
        OSError: it is not there.
    """
    left = folder / step.left
    if left.suffix == ".json":
        record = json.loads(left.read_text())
        if not record.get("complete", True):
            raise ValueError(f"{left} holds a run that was not finished")
        write_atomic(path, left.read_bytes())
        return
    record = condensed(step, _lines(left))
    record["seconds"] = None if seconds is None else round(seconds, 1)
    if (beside := folder / BY_LAYER).exists():
        record["by_layer"] = [compared(one) for one in _lines(beside)]
    write_atomic(path, dumped(record).encode())


def _lines(path: Path) -> list[Line]:
    """JSON objects, a line each, or several in one list."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for line in read for one in (line if isinstance(line, list) else [line])]


def condensed(step: Step, lines: Sequence[Line]) -> Line:
    """The record of `bench.jsonl`, `eval.jsonl`, ...: see `LINES` for what is kept of a line."""
    if not lines:
        raise ValueError(f"{step.name} measured nothing: {step.left} is empty")
    shared = {name: lines[-1][name] for name in ONCE if name in lines[-1]}
    flat = [LINES[step.left]({name: value for name, value in one.items() if name not in ONCE}) for one in lines]
    columns = list(dict.fromkeys(name for one in flat for name in one))
    same = [name for name in columns if all(name in one and one[name] == flat[0][name] for one in flat)]
    other = [name for name in columns if name not in same]
    return {
        "question": step.why,
        "command": step.command,
        **shared,
        "settings": {name: flat[0][name] for name in same},
        "columns": other,
        "records": [[rounded(one.get(name)) for name in other] for one in flat],
    }


def dumped(record: Mapping[str, Any]) -> str:
    """As JSON, with a line for each measurement."""
    text = json.dumps({**record, **{name: [] for name in LISTED if name in record}}, indent=1)
    for name in LISTED:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in record.get(name, ()))
        text = text.replace(f'"{name}": []', f'"{name}": [\n{rows}\n ]')
    return text + "\n"


def rows(record: Mapping[str, Any]) -> list[Line]:
    """The measurements of a condensed record, each with the settings that all of them share."""
    return [{**record["settings"], **dict(zip(record["columns"], one, strict=True))} for one in record["records"]]


def rounded(value: Any) -> Any:
    """Numbers to five digits, in lists and objects too."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def flattened(line: Mapping[str, Any], dropped: Iterable[str] = ()) -> Line:
    """`{"mean": {"mass": 1}}` as `{"mean.mass": 1}`, without what is named, wherever it stands."""
    out: Line = {}
    for name, value in line.items():
        if name in dropped:
            continue
        if isinstance(value, dict):
            out |= {f"{name}.{inner}": one for inner, one in flattened(value, dropped).items()}
        else:
            out[name] = value
    return out


def exploded(value: Any, path: Sequence[str], above: Mapping[str, Any] | None = None) -> Iterator[Line]:
    """A row for everything at the end of a path of lists and objects, with what stands above it.

    The key of an object on the path is a column of the path's name; `*` are all keys, as the column `key`. What is no
    object itself is the column `value`.
    """
    row = {**(above or {}), **(flattened(value, path[:1]) if isinstance(value, dict) else {"value": value})}
    if not path:
        yield row
        return
    name, *rest = path
    inner = value if name == "*" else value.get(name, [])
    if isinstance(inner, list):
        for one in inner:
            yield from exploded(one, rest, row)
    elif rest and rest[0] in inner:
        yield from exploded(inner, rest, row)
    else:
        row = dict(above or {}) if name == "*" else row
        for key, one in inner.items():
            yield from exploded(one, rest, {**row, "key" if name == "*" else name: key})


def _bench(line: Line) -> Line:
    """Means, the worst heads, and the means of each layer where the heads were kept apart."""
    heads = line.get("heads", {})
    by_layer = {f"layers.{name}": [_mean(layer) for layer in values] for name, values in heads.items()}
    return flattened(line, ("heads", "trace_meta", "rope", "tensors", "activity")) | _trace(line) | by_layer


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _trace(line: Line) -> Line:
    """What a trace says of itself that a table needs."""
    meta = line.get("trace_meta", {})
    return {f"trace.{name}": meta[name] for name in ("model", "text", "dtype") if isinstance(meta.get(name), str)}


def compared(line: Line) -> Line:
    """A comparison of methods at equal rows or bytes: what it says by layer and of heads, without its settings."""
    kept = ("trace", "equal", "at", "layers", "heads", "methods", "left_out", "missed_by_both", "spearman")
    return rounded({**{name: line[name] for name in kept}, "attended": line["attended"]})


def _recall(line: Line) -> Line:
    return flattened(line, ("trace_meta", "recipe")) | _trace(line)


# Of an answer: what no table is made of. Counts by layer are of its rows and bytes, of which means are kept.
EVAL_DROPPED = (
    *("prompt", "response", "answers", "source", "settings", "prefill_seconds", "index_seconds", "activity"),
)


def _eval(line: Line) -> Line:
    return flattened(line, EVAL_DROPPED) | line["settings"]


def _inspect(line: Line) -> Line:
    return flattened(line, ("trace_meta",)) | _trace(line)


def instructions(line: Line) -> Line:
    """Instructions of a compiled kernel, counted; loads as `bytes:instructions`."""
    loads = " ".join(f"{size}:{count}" for size, count in sorted(line["loads"].items(), key=lambda one: int(one[0])))
    return {**line, "mma": sum(line["mma"].values()), "loads": loads}


LINES: dict[str, Callable[[Line], Line]] = {
    "bench.jsonl": _bench,
    "recall.jsonl": _recall,
    "eval.jsonl": _eval,
    "inspect.jsonl": _inspect,
    "output.txt": instructions,
}
