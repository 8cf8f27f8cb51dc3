"""Views of estimated tails: what a method wins by a row for those that it does not read, at equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, parts, percent, table, text, ticked
from scripts.evidence.views_rivals import Curve
from scripts.evidence.views_traces import Measured, setting, spec
from sparseattn.selectors.combined.tailed import Tailed
from sparseattn.selectors.registry import make_selector

Record: TypeAlias = "Mapping[str, Any]"


def plain(label: str) -> str | None:
    """The label of what a tail is of: `Quest` for `Tailed(rows=64)`; None for a method that is no such pair."""
    method = make_selector(spec(label))
    return method.inner.label() if isinstance(method, Tailed) else None


def errors(record: Record) -> str:
    """Rows, bytes and error of every method and budget."""
    found = Measured(record)
    one = found.rows[0]
    lines = [
        [
            ticked(spec(each["label"])) + (f", {each['budget']:,}" if found.every(each["label"]) else ""),
            f"{each['mean.attended']:,.0f}",
            percent(each["mean.bytes_share"], 1),
            percent(each["mean.relative_error"], 1),
            percent(each["mean.recovered"]),
        ]
        for each in found.rows
    ]
    words = text(f"`{one['trace.model']}`, the text {one['trace']}: {setting(one)}.")
    return parts(words, table(["selector, budget", "rows", "bytes read", "relative error", "recovered"], lines))


def findings(record: Record) -> str:
    """The error with a tail over that without, at equal bytes and at equal rows chosen; those that win first."""
    found = Measured(record)
    pairs = [(label, inner) for label in found.labels() if (inner := plain(label)) in found.labels()]
    told = []
    for label, inner in pairs:
        assert inner is not None
        ratio = Curve(found, label, "bytes_share").against(Curve(found, inner, "bytes_share"))
        same = [
            f"{found.must(label, budget)['mean.relative_error'] / found.must(inner, budget)['mean.relative_error']:.2f}"
            f" at {budget:,}"
            for budget in sorted({one["budget"] for one in found.rows if one["label"] == inner})
        ]
        if ratio is None:
            words = f"{ticked(spec(label))} reads other shares of the cache than {ticked(spec(inner))} throughout"
        else:
            words = (
                f"{ticked(spec(label))} has {ratio:.2f} times the error of {ticked(spec(inner))} at equal bytes: "
                f"the tail {'pays' if ratio < 1 else 'does not pay'}"
            )
        told.append((1e9 if ratio is None else ratio, f"{words}. Of the same rows it has {', '.join(same)}."))
    return bullets(*(words for _, words in sorted(told)))
