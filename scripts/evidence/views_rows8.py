"""Views of rows of 8 and 4 bits: error and bytes beside the same choice of rows as they came; what predictions lose."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, parts, percent, significant, table, text, ticked
from scripts.evidence.views_agreement import Agreed, mean
from scripts.evidence.views_traces import Measured, setting, spec

Record: TypeAlias = "Mapping[str, Any]"


def rounding(label: str) -> tuple[str, int]:
    """A label's method and the bits of its rows: 16 where it says nothing of them."""
    found = re.fullmatch(r"(.*), (\d+)-bit rows", label)
    return (found[1], int(found[2])) if found else (label, 16)


def errors(record: Record) -> str:
    """Error of the output and bytes read, a line for each method and number of bits, two columns for each budget."""
    found = Measured(record)
    one = found.rows[0]
    budgets = sorted({row["budget"] for row in found.rows})
    lines = []
    for label in found.labels():
        method, bits = rounding(label)
        cells = []
        for budget in budgets:
            at = found.must(label, budget)
            cells += [percent(at["mean.relative_error"], 1), percent(at["mean.bytes_share"], 1)]
        lines.append([ticked(spec(method)), str(bits), *cells])
    head = ["", "bits", *(cell for budget in budgets for cell in (f"error, {budget:,} rows", "bytes"))]
    words = text(
        f"`{one['trace']}`, `{one['trace.model']}`: {setting(one)}. The output's error against full attention over the "
        "rows as they came; bytes read, to choose too, of the whole cache's in 16 bits."
    )
    return parts(words, table(head, lines, left=2))


def findings(*records: Record) -> str:
    """What rounding costs and saves at the same choice of rows, the largest budget of each record."""
    said = []
    for record in records:
        found = Measured(record)
        budget, name = max(row["budget"] for row in found.rows), found.rows[0]["trace.model"]
        for label in found.labels():
            method, bits = rounding(label)
            if bits == 16 or method not in found.labels():
                continue
            mine, plain = found.must(label, budget), found.must(method, budget)
            error = mine["mean.relative_error"] / plain["mean.relative_error"]
            read = mine["mean.bytes_share"] / plain["mean.bytes_share"]
            said.append(
                f"`{name}`, {ticked(spec(method))} at {budget:,} rows: {bits}-bit rows have {significant(error, 3)} "
                f"times the error of 16-bit ones and read {significant(read, 2)} times their bytes."
            )
    return bullets(*said)


def agreement(record: Record) -> str:
    """Divergence from full attention, equal likeliest tokens, nats a token lost and bytes, over all texts."""
    found = Agreed(record)
    one = found.rows[0]
    lines = []
    for asked in found.asked:
        method, bits = rounding(asked[0])
        mine = found.of(asked)
        cells = [f"{mean(mine, 'kl'):.4f}", percent(mean(mine, "same_top")), f"{mean(mine, 'nll_difference'):+.4f}"]
        budget = f", {int(asked[1]):,}" if asked[1] else ""
        lines.append([ticked(spec(method)) + budget, str(bits), *cells, percent(mean(mine, "bytes_share"), 1)])
    plain = mean([row for name in found.texts for row in found.full(name)], "nll")
    words = text(
        f"`{one['model']}`, {found.length:,} tokens of {', '.join(found.texts)}, {found.windows()} windows of each, "
        f"the last {one['scored_tokens']} tokens of each; sink {one['sink']}, window {one['window']}. KL divergence "
        "from full attention in nats a token, share of equal likeliest tokens, nats a token lost (full attention has "
        f"{plain:.3f}; perplexity is the exponential)."
    )
    return parts(words, table(["method, rows", "bits", "KL", "same token", "nats lost", "bytes"], lines, left=2))
