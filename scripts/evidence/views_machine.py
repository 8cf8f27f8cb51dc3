"""Views of predicted time: what was measured of the machine, and how far predictions are from measured steps."""

from __future__ import annotations

from typing import Any

from scripts.evidence.markdown import parts, percent, significant, table, text, ticked

Record = dict[str, Any]


def figures(record: Record) -> str:
    """What `sparseattn machine` measured."""
    machine = record["machine"]
    about = machine["about"]
    (dtype, speeds), *_ = machine["speeds"].items()
    shape = about["shape"]
    rows = [
        (
            ticked(kind),
            significant(1e6 * one["launch"]),
            "" if one["flops"] is None else significant(one["flops"] / 1e9),
            significant(1e9 * one["entry"]) if one["entry"] else "",
        )
        for kind, one in speeds.items()
    ]
    words = text(
        f"Measured on {about['machine']['cores']} cores ({about['machine']['processor']}) with {shape['heads']} KV "
        f"heads of {shape['group']} query heads, D {shape['size']}, {dtype}: the memory reads "
        f"{significant(machine['bandwidth'] / 1e9)} GB/s, and each kind of launch takes"
    )
    return parts(words, table(("", "µs a launch", "Gflop/s", "ns an entry"), rows))


def judged(record: Record) -> str:
    """How many predictions are within the bound, by method, and which are not."""
    bound, summary = record["bound"], record["summary"]
    rows = [
        (
            name if name == "dense" else ticked(name),
            *(str(one[count]) for count in ("points", "within")),
            *(percent(one[error]) for error in ("median", "largest")),
        )
        for name, one in summary.items()
    ]
    steps = [one for name, one in summary.items() if name != "dense"]
    within, every = (sum(one[name] for one in steps) for name in ("within", "points"))
    words = text(
        f"Of {every} measured steps {within} are predicted within {percent(bound)} ({percent(within / every)}), "
        f"and of {summary['dense']['points']} of dense attention {summary['dense']['within']}."
    )
    head = ("", "points", f"within {percent(bound)}", "median error", "largest")
    return parts(words, table(head, rows), _missed(record))


def _missed(record: Record) -> str:
    """The steps that are further off, by name."""
    off = [point for point in record["points"] if abs(point["error"]["step"]) > record["bound"]]
    if not off:
        return text("No step is further off.")
    rows = [
        (
            ticked(point["selector"]),
            point["sweep"],
            f"{point['at']:,}",
            f"{point['batch']} x {point['heads']}",
            *(significant(1e3 * point[name]["step"]) for name in ("measured", "predicted")),
            f"{100 * point['error']['step']:+.0f} %",
        )
        for point in off
    ]
    head = ("Further off", "sweep", "at", "sequences x KV heads", "ms measured", "ms predicted", "off")
    return table(head, rows, left=2)
