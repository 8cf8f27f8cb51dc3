"""What SAAP finds on prompts it was not trained on, and why: ``GOMP_SPINCOUNT=0 python -m scripts.saap.study``.

Needs the prompts of ``python -m scripts.saap``. Trains the ablations (layers 1 and 2, in ``build/saap/ablations``),
captures prompts of other kinds, and writes to ``--out``: ``compare.jsonl``, a record of `evaluate` a line, as of
``bench --far 0.5 --per-head``; ``study.json``, the rest; ``saap.png``. What is there already is kept, so that the same
command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from scripts.saap.__main__ import RECIPE, WORK, keep_capture
from scripts.saap.distribution import imbalance, inputs, largest_share, size_deviations
from scripts.saap.prompts import others
from sparseattn.cli.progress import progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.builtin_traces import BYTES, builtin_trace
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.evaluation.step_measures import COUNTED
from sparseattn.selectors.parameters.saap_artefact import Artefact, locate
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.trace import Trace, TraceLayer
from sparseattn.training import Filters, Recipe, TrainingError, train
from sparseattn.utils.files import write_atomic

LAYERS = (1, 2)  # those of the reference model whose heads look far on every kind of prompt
BUDGETS = (0.01, 0.05)
FAR = 0.5
LAST = 64
SHIFTS = (32768, 98304)
ABLATIONS: dict[str, dict[str, Any]] = {
    "roped": {"roped": True},
    # The paper's classifier. Without the linear path the recipe's rate and width get it nowhere (0.1 at 1 %).
    "paper": {"residual": False, "hidden": 1024, "rate": 1e-3, "steps": 1500, "validate": 50, "patience": 15},
    "short-range": {"filters": Filters(gap=0, near=0)},
    "per-query-head": {"per_query_head": True},
    "two-sided": {"filters": replace(RECIPE.filters, two_sided=True)},
    "reverse": {"reverse": True},
}
PERFECT = "sparseattn:PerfectBuckets"
# Name -> selector; {name} is the artefact of an ablation. All buckets may be visited, so that the budget decides.
METHODS = {
    "exact, each query head": "exact",
    "exact, one choice a group": "exact:group=softmax",
    "perfect classifier": f"{PERFECT}:probes=1024",
    "SAAP": "saap:probes=1024",
    "SAAP, context=0.8": "saap:probes=1024,context=0.8",
    "moments": "moments:probes=1024",
    "k-means, no RoPE": "kmeans:probes=1024",
    "k-means, roped": "kmeans:probes=1024,artefact={roped}",
    "perfect classifier, roped": f"{PERFECT}:probes=1024,artefact={{roped}}",
    "SAAP, each query head": "saap:probes=1024,group=each",
    "SAAP as in the paper": "saap:probes=1024,artefact={paper}",
    "SAAP, roped": "saap:probes=1024,artefact={roped}",
    "SAAP, no long-range filter": "saap:probes=1024,artefact={short-range}",
    "SAAP, classifier per query head": "saap:probes=1024,artefact={per-query-head}",
    "SAAP, two-sided pairs": "saap:probes=1024,artefact={two-sided}",
    "SAAP, reverse KL": "saap:probes=1024,artefact={reverse}",
    "quest": "quest",
    "quest, each query head": "quest:group=each",
    "random": "random",
}
SHIFTED = ("SAAP", "SAAP, context=0.8", "moments", "k-means, no RoPE", "k-means, roped")
COMPARED = (
    "exact, each query head",
    "exact, one choice a group",
    "perfect classifier",
    "SAAP",
    "SAAP, context=0.8",
    "moments",
    "k-means, no RoPE",
    "k-means, roped",
)
JUDGED = ("SAAP", "SAAP, context=0.8", "moments")
RECURRENCES = ("recall",)
SHOWN = ("recovered", "relative_error", "lookup_hits", "distinct_rows", "bytes_share")


def ablations(work: Path) -> dict[str, Path]:
    """Artefacts of the ablations, trained where they are missing.

    Raises:
        TrainingError: one that is there was made by another recipe.
    """
    folder = work / "ablations"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.safetensors" for name in ABLATIONS}
    for name, change in ABLATIONS.items():
        recipe = replace(RECIPE, **change)
        if paths[name].exists():
            _check_recipe(paths[name], recipe)
        else:
            with progress_bar() as bar:
                task = bar.add_task(name, total=None)

                def show(at: Any, bar: Any = bar, task: Any = task, name: str = name) -> None:
                    bar.update(task, description=f"{name} {at.layer} {at.stage}", completed=at.done, total=at.total)

                held = [work / "held-out"]
                train([work / "train"], paths[name], recipe, held_out=held, layers=LAYERS, device="cpu", progress=show)
    return paths


def _check_recipe(path: Path, recipe: Recipe) -> None:
    wanted = json.loads(json.dumps(asdict(recipe)))  # lists for tuples, as in a file
    found = Artefact.load(path).meta["recipe"]
    other = [f"{name} {found.get(name)} instead of {one}" for name, one in wanted.items() if found.get(name) != one]
    if other:
        raise TrainingError(f"{path} was trained with {', '.join(other)}: delete it, and it is made anew")


def traces(work: Path) -> dict[str, Trace]:
    """The byte model's built-in traces and one of each other kind: none was trained on but the kind of "recall"."""
    found = {name: builtin_trace(name) for name in BYTES}
    for name, text in others():
        path = work / "other" / f"{name}.safetensors"
        keep_capture(path, name, text)
        found[name] = Trace.open(path)
    return found


def shifted(trace: Trace, offset: int) -> Trace:
    """The same text at positions `offset` further on; attention is the same, as RoPE tells distances alone."""
    layers = []
    for index in trace.layers:
        one = trace.layer(index)
        assert one.rope is not None
        assert one.rope.scaling == 1
        query, keys = (one.rope.rotate(x.float(), torch.tensor([float(offset)])) for x in (one.query, one.keys))
        layers.append(TraceLayer(index, query, keys, one.values.float(), one.scale, one.rope, one.window))
    return Trace.build(layers, trace.positions + offset, trace.meta, f"{trace.name} from {offset}")


def compare(
    opened: Mapping[str, Trace], methods: Mapping[str, str], path: Path, budgets: Sequence[float], last: int
) -> dict[tuple[str, str, float], dict[str, Any]]:
    """(trace, method, budget) -> record per head; those that `path` holds are not measured again."""
    records: dict[tuple[str, str, float], dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            one = json.loads(line)
            records[one["trace"], one["method"], one["budget"]] = one
    with progress_bar() as bar:
        task = bar.add_task("compare", total=len(opened) * len(methods))
        for name, trace in opened.items():
            for method, spec in methods.items():
                bar.update(task, description=f"{name}: {method}")
                selector = make_selector(spec)
                known = [records.get((name, method, budget)) for budget in budgets]
                identity = _identity(trace, spec, selector, last)
                if any(one is None or one["identity"] != identity for one in known):
                    measured = evaluate_budgets(trace, selector, budgets, Replay(last=last, layers=LAYERS))
                    for budget, one in zip(budgets, measured, strict=True):
                        facts = {"method": method, "spec": spec, "identity": identity}
                        record = {**one.record(True), "trace": name, **facts}
                        if (one.heads["indexed_mass"] >= FAR).any():
                            far = one.far(FAR).record(True)
                            record |= {"far": {part: far[part] for part in ("mean", "worst")}}
                        records[name, method, budget] = record
                    lines = "".join(json.dumps(one) + "\n" for one in records.values())
                    write_atomic(path, lines.encode())
                bar.advance(task)
    return records


def _identity(trace: Trace, spec: str, selector: Any, last: int) -> str:
    """SHA-256 of what a record depends on, but for the code."""
    held = locate(selector.artefact).read_bytes() if hasattr(selector, "artefact") else b""
    text = json.dumps([trace.meta.get("text"), trace.positions[0].item(), spec, last, LAYERS])
    return hashlib.sha256(text.encode() + hashlib.sha256(held).digest()).hexdigest()


def per_kv(record: Mapping[str, Any], measure: str, group: int) -> list[list[float]]:
    """`[layers][H]` of a measure, the mean over each group (over lookups, where these are counted)."""
    values = torch.tensor([[float("nan") if v is None else v for v in layer] for layer in record["heads"][measure]])
    weight = torch.ones_like(values)
    if measure in COUNTED:
        weight = torch.tensor(record["heads"][COUNTED[measure]])
    sums, total = (
        (x.nan_to_num() * weight).unflatten(1, (-1, group)).sum(-1) for x in (values, torch.ones_like(values))
    )
    return (sums / total).tolist()


def bars(
    records: Mapping[tuple[str, str, float], dict[str, Any]], names: Sequence[str], group: int
) -> list[dict[str, Any]]:
    """For every trace, layer and KV head that looks far: attention recovered at each budget, lookups hit at 1 %.

    The latter are None where there are none.
    """
    out = []
    for name in names:
        one = records[name, "SAAP", 0.01]
        far = per_kv(one, "indexed_mass", group)
        for i, layer in enumerate(one["layers"]):
            for head, mass in enumerate(far[i]):
                if mass < FAR:
                    continue
                row: dict[str, Any] = {"trace": name, "layer": layer, "head": head, "far mass": mass}
                for method in COMPARED:
                    row[method] = [per_kv(records[name, method, b], "recovered", group)[i][head] for b in BUDGETS]
                    hits = per_kv(records[name, method, 0.01], "lookup_hits", group)[i][head]
                    row[f"{method}: lookups"] = None if math.isnan(hits) else hits
                out.append(row)
    return out


def judged(rows: Sequence[Mapping[str, Any]], recurrences: Sequence[str]) -> list[dict[str, Any]]:
    """What SAAP is held to, by trace, layer and KV head that looks far: a value, its bound, and whether it passes.

    On recurrences, where each query head's own best 5 % of the rows hold 0.9 of its far attention (mean over the
    group), SAAP at 5 % is held to `Exact`; everywhere else to a perfect classifier of its buckets, at both budgets.

    Args:
        rows: of `bars`.
        recurrences: names of the traces whose text recurs at any distance.
    """
    out: list[dict[str, Any]] = []
    for row in rows:
        recurs = row["trace"] in recurrences
        exact, perfect = row["exact, each query head"], row["perfect classifier"]
        roped, plain = row["k-means, roped"][0], row["k-means, no RoPE"][0]
        for method in JUDGED:
            found, hits = row[method], row[f"{method}: lookups"]
            against: list[tuple[str, float, float, bool]] = []  # bar, value, bound, further condition
            if recurs:
                against.append(
                    ("no-rope k-means at 1 %, itself above roped", found[0], plain, roped < plain < found[0])
                )
            if recurs and exact[1] >= 0.9:
                against.append(("Exact at 5 %", found[1], 0.90 * exact[1], True))
            else:
                against += [
                    (f"a perfect classifier at {budget:.0%}", found[b], 0.95 * perfect[b], True)
                    for b, budget in enumerate(BUDGETS)
                ]
            if hits is not None:
                against.append(("lookups at 1 %", hits, 0.95, True))
            place = {name: row[name] for name in ("trace", "layer", "head")}
            out += [
                {
                    **place,
                    "method": method,
                    "bar": bar,
                    "value": value,
                    "bound": bound,
                    "passes": fits and value >= bound,
                }
                for bar, value, bound, fits in against
            ]
    return out


def buckets_study(work: Path, paths: Mapping[str, Path], opened: Mapping[str, Trace]) -> dict[str, Any]:
    """Imbalance in and out of distribution, deviation of sizes by sampling, share of the largest bucket."""
    reference, roped = Artefact.load("reference"), Artefact.load(paths["roped"])
    trained = [Trace.open(path) for path in sorted((work / "train").glob("*.safetensors"))]
    held = [Trace.open(path) for path in sorted((work / "held-out").glob("*.safetensors"))]
    out: dict[str, Any] = {"imbalance": {}, "visited": {}, "deviation": {}, "largest": {}}
    everything = {f"held-out {one.name}": one for one in held} | dict(opened)
    with progress_bar() as bar:
        task = bar.add_task("buckets", total=len(everything) + 4 * len(LAYERS))
        for name, trace in everything.items():
            factors = []
            for layer in LAYERS:
                keys = inputs(reference, trace, layer)[0]
                held_in = reference.layers[layer]
                factors += [imbalance(head, held_in.centroids.shape[1]) for head in held_in.assign(keys)]
            out["imbalance"][name] = factors
            # Slots of one row, so that no row waits for others to be sealed and is counted as visited.
            one = evaluate_budgets(trace, "saap:span=1", [None], Replay(last=8, layers=LAYERS))[0]
            dense = one.settings["sink"] + one.settings["window"]
            rows = one.heads["attended"] / one.heads["attended_share"]
            visited = (one.heads["attended"] - dense) / (rows - dense)  # alike in a group
            out["visited"][name] = visited[:, :: trace.shapes[LAYERS[0]].group].flatten().tolist()
            bar.advance(task)
        for kind, artefact in (("no RoPE", reference), ("roped", roped)):
            for layer in LAYERS:
                out["deviation"][f"{kind}, layer {layer}"] = size_deviations(artefact, layer, trained, held)
                bar.advance(task)
                out["largest"][f"{kind}, layer {layer}"] = largest_share(artefact, layer, held)
                bar.advance(task)
    return out


def joint(
    opened: Mapping[str, Trace], records: Mapping[tuple[str, str, float], dict[str, Any]], last: int
) -> list[dict[str, Any]]:
    """Joint probing at as many rows read per KV head as independent probing reads at each budget (Figure 7)."""
    out = []
    for name in BYTES:
        for budget in BUDGETS:
            each = records[name, "SAAP, each query head", budget]["far"]["mean"]
            dense = records[name, "SAAP", budget]["far"]["mean"]["distinct_rows"] - int(budget * opened[name].tokens)
            rows = round(each["distinct_rows"] - dense)
            one = evaluate_budgets(opened[name], METHODS["SAAP"], [rows], Replay(last=last, layers=LAYERS))[0].far(FAR)
            found = {
                way: {measure: mean[measure] for measure in SHOWN}
                for way, mean in (("independent", each), ("joint", one.record()["mean"]))
            }
            out.append({"trace": name, "budget of a query head": budget, "budget of a group": rows, **found})
    return out


def table(records: Mapping[tuple[str, str, float], dict[str, Any]], name: str, methods: Sequence[str]) -> Table:
    """A trace's methods at both budgets, over the heads that look far."""
    out = Table(title=f"{name}: heads with {FAR:g} or more of their attention beyond sink and window")
    out.add_column("method")
    for budget in BUDGETS:
        for measure in ("recovered", "error", "lookups", "distinct", "bytes"):
            out.add_column(f"{measure}\n{budget:.0%}", justify="right", no_wrap=True)
    for method in methods:
        cells = []
        for budget in BUDGETS:
            one = records[name, method, budget].get("far", {}).get("mean", {})
            for measure in SHOWN:
                value = one.get(measure)
                cells.append("-" if value is None else f"{value:.0f}" if measure == "distinct_rows" else f"{value:.3f}")
        out.add_row(method, *cells)
    return out


def judgement(verdicts: Sequence[Mapping[str, Any]]) -> Table:
    """How many heads pass each bar, and which do not."""
    out = Table("method", "bar", "pass", "fail: trace, layer, KV head (value, bound)", title="Bars")
    places: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in verdicts:
        places.setdefault((one["method"], one["bar"]), []).append(one)
    for (method, bar), ones in places.items():
        failed = [
            f"{one['trace']} {one['layer']}.{one['head']} ({one['value']:.2f}, {one['bound']:.2f})"
            for one in ones
            if not one["passes"]
        ]
        out.add_row(method, bar, f"{len(ones) - len(failed)} of {len(ones)}", "; ".join(failed))
    return out


def figure(records: Mapping[tuple[str, str, float], dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """Recovered attention by method and trace, at both budgets."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in names if "far" in records[name, "SAAP", 0.01]]
    methods = (*COMPARED[1:], "quest")
    drawn, axes = pyplot.subplots(1, len(shown), figsize=(3.2 * len(shown), 3.4), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], shown, strict=True):
        for offset, budget, colour in ((0.2, 0.05, "#9ecae1"), (-0.2, 0.01, "#08519c")):
            values = [records[name, method, budget]["far"]["mean"]["recovered"] for method in methods]
            at = [i + offset for i in range(len(methods))]
            axis.barh(at, values, 0.4, color=colour, label=f"{budget:.0%} of the rows")
        axis.set_title(name)
        axis.set_xlim(0, 1)
        axis.grid(axis="x", alpha=0.3)
    axes[0, 0].set_yticks(range(len(methods)), methods)
    axes[0, 0].invert_yaxis()
    axes[0, 0].legend(fontsize=7, loc="lower right")
    drawn.supxlabel("share of the attention beyond sink and window that is recovered", fontsize=9)
    drawn.tight_layout()
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)


def study(work: Path, out: Path, last: int, console: Console) -> None:
    """All of it."""
    out.mkdir(parents=True, exist_ok=True)
    paths = ablations(work)
    filled = {name: spec.format(**paths) for name, spec in METHODS.items()}
    opened = traces(work)
    group = next(iter(next(iter(opened.values())).shapes.values())).group
    keep: Callable[..., Any] = functools.partial(compare, path=out / "compare.jsonl", budgets=BUDGETS, last=last)
    records = keep(opened, filled)
    moved = {f"recall from {at}": shifted(opened["recall"], at) for at in SHIFTS}
    records = keep(moved, {name: filled[name] for name in SHIFTED})
    for name in opened:
        console.print(table(records, name, list(METHODS)))
    for name in moved:
        console.print(table(records, name, SHIFTED))
    rest = buckets_study(work, paths, opened)
    rows = bars(records, list(opened), group)
    verdicts = judged(rows, RECURRENCES)
    rest |= {
        "joint": joint(opened, records, last),
        "bars": rows,
        "judged": verdicts,
        "machine": machine(),
        "versions": versions(),
    }
    write_atomic(out / "study.json", (json.dumps(rest, indent=1, allow_nan=False) + "\n").encode())
    console.print_json(json.dumps({name: rest[name] for name in ("deviation", "largest", "joint")}))
    console.print(judgement(verdicts))
    figure(records, list(opened), out / "saap.png")
    console.print(f"{out / 'compare.jsonl'}, {out / 'study.json'}, {out / 'saap.png'}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.saap.study", description="Measure SAAP and its ablations.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=WORK, help="where traces and ablations are kept")
    parser.add_argument("--out", type=Path, default=WORK / "study")
    parser.add_argument("--last", type=int, default=LAST, help="tokens decoded at the end of each prompt")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not any((options.work_dir / "held-out").glob("*.safetensors")):
        parser.error(f"{options.work_dir} holds no prompts: run `python -m scripts.saap` first")
    study(options.work_dir, options.out, options.last, Console(width=160))


if __name__ == "__main__":
    main()
