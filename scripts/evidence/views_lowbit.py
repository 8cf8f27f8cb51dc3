"""Views of keys of few bits: what they recover beside the rows' true order and Quest, and where they fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, parts, percent, significant, table, text, ticked
from scripts.evidence.views_agreement import FULL, Agreed
from scripts.evidence.views_asked import Asked
from scripts.evidence.views_speed import BF16, machine_of, setting_of, timed
from scripts.evidence.views_traces import Measured, spec

Record: TypeAlias = "Mapping[str, Any]"

ROWS = 256  # of the budget that tables show
ORDER = "Exact(group='softmax')"
VOTES = ("LowBit", "LowBit(group='sum')", "LowBit(group='max')", "LowBit(group='each')")
NAMES = {  # of a record of `benchmarks.lowbit`, in the order of the columns
    "lowbit": "`lowbit`",
    "lowbit:bits=1": "one bit",
    "lowbit before RoPE": "before RoPE",
    "quest:group=softmax": "`quest`",
}


def recovered(*records: Record) -> str:
    """Share of the attention on indexed rows recovered, of what the true order recovers, and bytes; a pair a trace."""
    found = [Measured(record) for record in records]
    one = found[0].rows[0]
    words = text(
        f"Recovered share of each head's attention on indexed rows at {ROWS} rows, in brackets of what the rows' true "
        f"order (`exact:group=softmax`) recovers, and bytes read of the cache's. The last {one['last']} tokens of each "
        f"trace are decoded with sink {one['sink']} and window {one['window']}: "
        + "; ".join(
            f"`{mine.traces[0]}`, {mine.rows[0]['tokens']:,} tokens, `{mine.rows[0]['trace.model']}`" for mine in found
        )
        + "."
    )
    head = ["", *(cell for mine in found for cell in (f"`{mine.traces[0]}`", "bytes"))]
    lines = []
    for label in found[-1].labels():
        cells = []
        for mine in found:
            at, best = mine.must(label, ROWS), mine.must(ORDER, ROWS)["mean.recovered"]
            cells += [
                f"{at['mean.recovered']:.2f} ({at['mean.recovered'] / best:.2f})",
                percent(at["mean.bytes_share"], 1),
            ]
        lines.append([ticked(spec(label)), *cells])
    return parts(words, table(head, lines))


def votes(record: Record) -> str:
    """How a query group votes."""
    found = Measured(record)
    said = ", ".join(f"{ticked(spec(label))} {found.must(label, ROWS)['mean.recovered']:.3f}" for label in VOTES)
    rows = found.must("LowBit(group='each')", ROWS)["mean.attended"]
    return text(
        f"Votes on `{found.traces[0]}` at {ROWS} rows: {said}. With `each` a query head reads {rows:,.0f} rows like "
        "the others, and its KV head reads up to as many times more as it has query heads."
    )


def scales(record: Record) -> str:
    """Levels of 8 bits beside those of 16."""
    found = Measured(record)
    lines = []
    for label in found.labels():
        mine = [found.must(label, ROWS, trace) for trace in found.traces]
        cells = [f"{one['mean.recovered']:.3f}" for one in mine]
        lines.append([ticked(spec(label)), *cells, percent(mine[0]["mean.bytes_share"], 1)])
    return table([f"recovered, {ROWS} rows", *map(ticked, found.traces), "bytes"], lines)


def nearer(*records: Record) -> str:
    """How many times smaller the divergence is than Quest's, text by text."""
    lines = []
    for record in records:
        found = Agreed(record)
        for name in found.texts:
            mine = {asked[0]: found.of(asked, name) for asked in found.asked if asked[1] in (str(ROWS), ROWS)}
            kl = {method: sum(one["kl"] for one in windows) / len(windows) for method, windows in mine.items()}
            quest = kl["Quest"]
            cells = [f"{kl[method]:.4f}" for method in (ORDER, "LowBit", "TwoStage", "LowBit(bits=1)", "Quest")]
            ratio = quest / kl["LowBit"] if kl["LowBit"] > 0 else float("inf")
            model, tokens = found.rows[0]["model"], found.length
            lines.append([f"`{model}`, {tokens:,} tokens, {name} ({found.kinds[name]})", *cells, significant(ratio)])
    head = ["KL at 256 rows, nats a token", "true order", "`lowbit`", "`twostage`", "one bit", "`quest`"]
    return table([*head, "`quest` / `lowbit`"], lines)


def passkey(*records: Record) -> str:
    """Answers of full attention and of keys of few bits."""
    lines = []
    for record in records:
        asked = Asked(record)
        task, budget = asked.tasks[0], str(ROWS)
        methods = list(dict.fromkeys(one["method"] for one in asked.rows if one["method"] != FULL))
        shares = [f"{ticked(spec(method))} {percent(asked.share(task, method, budget))}" for method in methods]
        lengths = " and ".join(f"{length:,}" for length in sorted({one["length"] for one in asked.rows}))
        lines.append(
            f"`{asked.rows[0]['model']}`, {task}, {asked.prompts()} prompts of {lengths} tokens: full attention "
            f"answers {percent(asked.share(task, FULL, None))}; at {ROWS} rows {', '.join(shares)}."
        )
    return bullets(*lines)


def speed(record: Record) -> str:
    """One decode step on a CPU."""
    words = text(
        f"The table times {setting_of(record)}, bfloat16 and budget {record['budget']:,}, on {machine_of(record)} with "
        "cold caches. Dense is the fastest of torch's seven ways in the same rounds."
    )
    lines = []
    named = ("lowbit", "twostage", "quest", "saap")
    every = next(one for one in record["results"] if one["dtype"] == BF16)["selectors"]
    for method in (one for one in every if one["selector"].partition(":")[0] in named):
        way, seconds = timed(record, method["selector"]), method["seconds"]
        step, times, bound = way.cells(BF16)
        select, attend = (f"{1e3 * seconds[part]['median']:.1f}" for part in ("select", "attend"))
        share, build = method["append"]["share_of_step"], method["prefill_seconds"]["index"]["wall"]
        cells = [step, select, attend, times, bound, percent(share, 1), f"{build:.1f}"]
        lines.append([ticked(method["selector"]), *cells])
    head = ["", "step, ms", "select", "attend", "times dense", "bytes bound", "append, of a step", "index, s"]
    return parts(words, table(head, lines))


def slope(record: Record) -> str:
    """How a step grows from the fewest rows to the most."""
    points = record["sweeps"]["rows"]["points"]
    lines = []
    for name in dict.fromkeys(one["selector"] for one in points):
        mine = [one for one in points if one["selector"] == name]
        cells = [f"{1e3 * one['seconds']['step']['median']:.1f} ({one['speed_up']['median']:.1f})" for one in mine]
        lines.append([ticked(name), *cells])
    rows = list(dict.fromkeys(one["rows"] for one in points))
    words = text(
        "Milliseconds of a step as the context grows, in brackets how many times as fast as dense attention, with "
        f"{points[0]['heads']} KV heads and budget {points[0]['budget']:,}:"
    )
    return parts(words, table(["rows", *(f"{count:,}" for count in rows)], lines))


def limits(record: Record) -> str:
    """Recovered share on keys of many kinds, of the true order's, and the error of logits: means over layers, sizes."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    trace = ""
    for one in record["problems"]:
        name, _, layer = one["keys"].partition(", layer ")
        if layer:  # "prose, layer 2", or "prose, layer 2, a million positions on"; what follows is made of its keys
            trace, name = name, f"{name}{layer.lstrip('0123456789')}"
        elif ", D = " in name:
            name = name.partition(", D = ")[0]
        else:
            name = f"{trace}, {name}"
        kinds.setdefault(name, []).append(one)
    names = [name for name in NAMES if any(name in one["methods"] for one in record["problems"])]
    lines = []
    for kind, mine in kinds.items():
        cells = [f"{_mean(one['order'] for one in mine):.2f}"]
        for name in names:
            there = [one for one in mine if name in one["methods"]]
            cells.append(f"{_mean(one['methods'][name]['mean'] / one['order'] for one in there):.2f}" if there else "")
        errors = [one["errors"]["2"] for one in mine]
        cells.append(f"{_mean(one['rms.numba'] for one in errors):.2f}")
        lines.append([kind, *cells, f"{max(one['of_bound.numba'] for one in errors):.2f}"])
    head = ["keys", "true order", *(NAMES[name] for name in names), "rms error", "largest / bound"]
    sizes = sorted({one["size"] for one in record["problems"] if ", D = " in one["keys"]})
    words = text(
        f"The first column is the share that the rows' true order recovers at {record['budget']} rows, the next ones "
        "are what methods recover of it. The error is that of two-bit logits as numba's kernel has them, in standard "
        "deviations of the logits, and the largest one as a part of the bound. Means over three layers of a trace, and "
        f"over drawn keys of D = {', '.join(map(str, sizes))}:"
    )
    return parts(words, table(head, lines))


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def planes(record: Record) -> str:
    """How far attention on keys of few bits is off."""
    said = []
    for one in record["problems"]:
        if "attention" in one:
            off = ", ".join(f"{percent(one['attention'][bits], 1)} with {bits} bits" for bits in ("8", "4", "2"))
            said.append(f"{one['keys']}: {off}")
    return bullets(*said)


def predicted(record: Record) -> str:
    """What bytes alone would allow on a GPU: what a step of each method reads against dense's."""
    one = next(one for one in record["results"] if one["dtype"] == BF16)
    heads, places, query = one["batch"] * one["heads"], one["rows"], one["group"]
    lines = []
    for name, scored in (("quest", places / 16), ("lowbit", float(places))):
        method = timed(record, name).of[BF16]
        read, dense = method["scan_bytes"] + method["rows_bytes"], method["dense_bytes"]
        voted = 3 * 4 * heads * scored  # a vote is written, and read twice by top-k
        apart = 2 * 4 * heads * scored * query  # by softmax a score of each query head is written and read besides
        cells = [f"{dense / (read + more):.1f}" for more in (voted, voted + apart)]
        lines.append([ticked(name), f"{read / 2**20:.0f}", *cells])
    words = text(
        f"**Predicted from bytes alone, not measured**: {places:,} rows, {one['heads']} KV heads of {query} query "
        f"heads, D {one['size']}, bfloat16, budget {record['budget']:,}. A step reads so many MiB of index and rows, "
        "and dense attention so many times more, scores and votes counted:"
    )
    return parts(words, table(["", "MiB", "times, `group=sum`", "times, `group=softmax`"], lines))
