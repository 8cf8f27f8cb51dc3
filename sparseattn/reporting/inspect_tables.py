"""The tables of `inspect` and its closing lines: what was measured, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sparseattn.evaluation.attention_stats import COUNTS, PAGES, Inspection
from sparseattn.evaluation.measure_table import BEFORE, BEST, NEEDED, measure
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import plain

ALIKE = 1.2  # ratio of distances up to which queries lie where keys lie

ROWS = (
    *("query_distance", "key_distance", "distance_ratio", "far_mass", *(f"top_share@{k}" for k in COUNTS)),
    *("overlap@1", f"overlap@{BEFORE}", f"rows@{BEFORE}"),
)
ROWS_ARE = (
    "query, key: Mahalanobis distance from the keys outside sink and window; ratio: the one by the other. far: share "
    f"of the attention on these keys. top k: % of it on the k best tokens. last, last {BEFORE}: % of the {NEEDED} "
    f"best tokens that the step before needed, or one of {BEFORE} steps before. rows of {BEFORE}: different tokens "
    "that these needed."
)
BOUNDS = tuple(f"{name}@{page}" for page in PAGES for name in ("slack", "rank", "hits", "best_share", "bound_share"))
BOUNDS_ARE = (
    f"For pages of {PAGES[0]} and {PAGES[1]} tokens. slack: the bound minus the page's largest logit, in standard "
    f"deviations of the logits. rank: rank correlation of the two. hits: % of the {BEST} pages with the largest logits "
    f"that the bound finds. best, bound: % of the attention outside sink and window on {NEEDED} tokens in whole pages: "
    f"those with the largest logits, and those that the bound selects. top {NEEDED} is that of single tokens."
)


def tables(inspection: Inspection, per_head: bool) -> list[Table]:
    """Return what was measured of the rows, and of Quest's bounds: a row a layer and one of all, or a row a head."""
    settings = inspection.settings
    where = (
        f"last {settings['last']} of {settings['tokens']} tokens, sink {settings['sink']}, window {settings['window']}"
        f"{'' if per_head else '; mean over heads'}"
    )
    return [
        _table(f"{inspection.trace}, tokens: {where}", ROWS, ROWS_ARE, inspection, per_head),
        _table(f"{inspection.trace}, pages: {where}", BOUNDS, BOUNDS_ARE, inspection, per_head),
    ]


def _table(title: str, keys: Sequence[str], note: str, inspection: Inspection, per_head: bool) -> Table:
    # The note says which numbers are percents, all but one, so that the heads of columns stay short.
    heads = [Column.of(key, None if key == "far_mass" else measure(key).short) for key in keys]
    out = Table(title, [Column(name) for name in ("layer", *(["head"] if per_head else []))] + heads, note=note)
    for layer, measured in inspection.heads.items():
        if not per_head:
            out.add(layer, *(inspection.mean(key, layer) for key in keys))
            continue
        for head in range(len(measured["far_mass"])):
            out.add(layer, head, *(float(measured[key][head]) for key in keys))
    if not per_head:
        out.rule()
        out.add("all", *map(inspection.mean, keys))
    return out


def findings(inspection: Inspection) -> list[str]:
    """Return three sentences: where queries lie, which rows are needed, what pages make of it."""
    return [
        f"{plain(inspection.trace)}, {sentence}"
        for sentence in (_distance(inspection), _needed(inspection), _bounds(inspection))
    ]


def _distance(inspection: Inspection) -> str:
    ratio = inspection.mean("distance_ratio")
    if ratio > ALIKE:
        what = "queries are distributed differently from keys"
    else:
        what = "queries are distributed like keys"
    return (
        f"distance: a query is {ratio:.1f} times as far from the keys as another key is "
        f"({_by_layer(inspection, 'distance_ratio', lambda x: f'{x:.1f}')}): {what}."
    )


def _needed(inspection: Inspection) -> str:
    settings, top = inspection.settings, f"top_share@{NEEDED}"
    far = settings["tokens"] - settings["sink"] - settings["window"]
    change = ""
    if settings["last"] > 1:
        change = (
            f" From one step to the next {_percent(inspection.mean('overlap@1'))} of these tokens stay the same, "
            f"against {_percent(min(NEEDED / far, 1))} by chance."
        )
    return (
        f"tokens: {_percent(inspection.mean('far_mass'))} of the attention is outside sink and window "
        f"({_by_layer(inspection, 'far_mass', _percent)}), and the best {min(NEEDED, far)} of {far:,} tokens there "
        f"hold {_percent(inspection.mean(top))} of that ({_by_layer(inspection, top, _percent)}).{change}"
    )


def _bounds(inspection: Inspection) -> str:
    page = PAGES[0]
    count, hits, bound = NEEDED // page, f"hits@{page}", f"bound_share@{page}"
    rows, right, named = (inspection.mean(name) for name in (f"top_share@{NEEDED}", f"best_share@{page}", bound))
    return (
        f"pages: of the attention outside sink and window, {NEEDED} single tokens hold {_percent(rows)}, the {count} "
        f"pages with the largest logits {_percent(right)}, and the {count} pages that Quest's bound selects "
        f"{_percent(named)} ({_by_layer(inspection, bound, _percent)}). So reading whole pages costs "
        f"{100 * (rows - right):.0f} points, and the bound {100 * (right - named):.0f} more. It finds "
        f"{_percent(inspection.mean(hits))} of the {BEST} pages with the largest logits "
        f"({_by_layer(inspection, hits, _percent)})."
    )


def _by_layer(inspection: Inspection, measure: str, shown: Callable[[float], str]) -> str:
    low, high = inspection.extremes(measure)
    if low == high:
        return f"layer {low}"
    return f"layer {low}: {shown(inspection.mean(measure, low))}, layer {high}: {shown(inspection.mean(measure, high))}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"
