"""What `eval` shows people of agreement with full attention: tables with intervals over windows, and findings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sparseattn.evaluation.intervals import student
from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting.eval_tables import Record, Row, at, by, mean, rows_of, select

NEAR = 0.02  # nats a token of divergence from full attention: near enough
MOST_NATS = 700  # beyond them a perplexity is more than a float holds


def panels(records: Sequence[Record]) -> dict[tuple[str, str, int], list[Record]]:
    """Records apart by text, its kind and the windows' length."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for one in records:
        groups.setdefault((one["text"], one["kind"], one["length"]), []).append(one)
    return groups


def title(place: tuple[str, str, int], records: Sequence[Record]) -> str:
    """What was measured on one text at one length."""
    text, kind, length = place
    count = len({one["prompt"] for one in records})
    windows = f"{count} windows" if count > 1 else "1 window, so no interval"
    return f"{text} ({kind}), {length:,} tokens, {windows}"


def bytes_share(records: Sequence[Record]) -> float:
    """Bytes read over bytes stored; NaN where one is not known."""
    return mean(math.nan if one.get("bytes_share") is None else one["bytes_share"] for one in records)


def perplexity(records: Sequence[Record]) -> float:
    """Over all tokens."""
    tokens = sum(one["scored_tokens"] for one in records)
    nats = sum(one["nll"] * one["scored_tokens"] for one in records) / tokens
    return math.exp(nats) if nats < MOST_NATS else math.inf


def tables(records: Sequence[Record]) -> list[Table]:
    """One for each text and length: a row a method, set of layers and budget."""
    return [_table(place, mine) for place, mine in panels(records).items()]


def _table(place: tuple[str, str, int], records: Sequence[Record]) -> Table:
    one, settings = records[0], records[0]["settings"]
    out = Table(
        title=(
            f"{settings['model']}, agreement with full attention: {title(place, records)}, the last "
            f"{one['scored_tokens']} tokens of each; sink {settings['sink']}, window {settings['window']}, "
            f"{settings['dense_layers']} dense layers. KL and NLL in nats a token, in brackets 95 % intervals over "
            f"windows; rows read per query head of a sparse layer, and bytes of such a layer's"
        ),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    out.add_column("method")
    for name in ("budget", "rows", "bytes %", "KL", "same top %", "NLL more", "perplexity"):
        out.add_column(name, justify="right")
    for row in rows_of(records):
        mine = select(records, row)
        share = bytes_share(mine)
        out.add_row(
            row[0],
            row[1] or "-",
            f"{mean(one['rows'] for one in mine):,.0f}",
            "?" if math.isnan(share) else f"{100 * share:.1f}",
            _cell(mine, "kl", (0.0, math.inf)),
            _cell(mine, "same_top", (0.0, 100.0), 100, 1),
            _cell(mine, "nll_difference", (-math.inf, math.inf)),
            f"{perplexity(mine):.3f}",
        )
    return out


def _cell(records: Sequence[Record], name: str, ends: tuple[float, float], times: float = 1, digits: int = 4) -> str:
    """A mean and its interval, within the `ends` that there can be."""
    values = [times * one[name] for one in records]
    level, around = f"{mean(values):.{digits}f}", student(values)
    if around is None or records[0]["method"] == FULL:  # which is what it is compared with
        return level
    return f"{level} ({max(around[0], ends[0]):.{digits}f} to {min(around[1], ends[1]):.{digits}f})"


def verdicts(records: Sequence[Record]) -> list[str]:
    """A finding for each length and set of layers: what stays near full attention for the fewest rows and bytes."""
    said = []
    for length, mine in by(records, "length").items():
        texts = list(by(mine, "text"))
        windows = len({one["prompt"] for one in mine})
        where = f"{', '.join(texts)}; {windows} window{'s' * (windows > 1)}"
        sparse = [{"layers": None, **one} for one in mine if one["method"] != FULL]
        for layers, theirs in by(sparse, "layers").items():
            sets = "" if layers is None else f", sparse in layers {layers}"
            ours = [{**one, "layers": None} for one in theirs]  # named once
            said.append(f"agreement at {length:,} tokens{sets} ({where}): {_finding(ours, len(texts))}")
    return said


def _finding(records: Sequence[Record], texts: int) -> str:
    grid = {row: select(records, row) for row in rows_of(records)}
    worst = {
        row: max(mean(one["kl"] for one in text) for text in by(mine, "text").values()) for row, mine in grid.items()
    }
    rows = {row: mean(one["rows"] for one in mine) for row, mine in grid.items()}
    shares = {row: bytes_share(mine) for row, mine in grid.items()}
    near = [row for row in grid if worst[row] <= NEAR]
    least = min(near or grid, key=(rows if near else worst).__getitem__)
    every = " on every text" if texts > 1 else ""
    if near:
        said = f"fewest rows within {NEAR} nats a token of full attention{every}: "
    else:
        said = f"nothing measured stays within {NEAR} nats a token of full attention{every}; nearest: "
    said += _facts(least, grid, worst, rows, texts)
    known = [row for row in near if not math.isnan(shares[row])]
    if known:
        cheapest = min(known, key=shares.__getitem__)
        which = "the same" if cheapest == least else at(cheapest)
        said += f" Fewest bytes: {which}, {shares[cheapest]:.0%} of a sparse layer's."
    farthest = max(grid, key=worst.__getitem__)
    if farthest != least:
        said += f" Farthest: {_facts(farthest, grid, worst, rows, texts)}"
    return said


def _facts(
    row: Row, grid: Mapping[Row, Sequence[Record]], worst: Mapping[Row, float], rows: Mapping[Row, float], texts: int
) -> str:
    most = " where it is largest" if texts > 1 else ""
    same = mean(one["same_top"] for one in grid[row])
    return (
        f"{at(row)}, {rows[row]:,.0f} rows, {worst[row]:.3f} nats{most}, {same:.0%} of the likeliest tokens the same."
    )
