"""The one table of measures: for every number that records hold its name, words, unit, format and better direction.

Tables, plots and the page of `sparseattn report` take their labels and formats from here, by the name in the records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

LOOKUP = 0.2  # share of a query head's attention on one indexed row that makes it a lookup
NEEDED = 256  # best rows of a token, where their change and pages are measured
HELD = 0.9  # share of the far attention, whose fewest rows are counted
BEFORE = 8  # tokens before, whose rows together are compared with a token's
BEST = 16  # pages that a bound should find

HIGH, LOW = "high", "low"


@dataclass(frozen=True)
class Format:
    """How a table writes a number; the unit stands in the column's head.

    Args:
        digits: behind the point, or significant digits with `significant`.
        factor: what a value is multiplied by.
        unit: of the result, such as "%".
        signed: whether a plus stands before what is not negative.
    """

    digits: int = 0
    factor: float = 1
    unit: str = ""
    significant: bool = False
    signed: bool = False

    def __call__(self, value: float | None, missing: str = "-") -> str:
        """Return the text of a value, without its unit; `missing` for None and NaN."""
        if value is None or math.isnan(value):
            return missing
        kind = "g" if self.significant else "f"
        return f"{self.factor * value:{'+' if self.signed else ''},.{self.digits}{kind}}"


COUNT = Format()
PERCENT = Format(1, 100, "%")
WHOLE_PERCENT = Format(0, 100, "%")
FRACTION = Format(2)
SIGNIFICANT = Format(3, significant=True)


@dataclass(frozen=True)
class Measure:
    """What one number of a record is, and how people are shown it.

    Args:
        key: its name in records.
        short: head of a column, without the unit.
        better: `HIGH`, `LOW`, or nothing where neither is.
        format: in a table's cell.
        unit: "share" (of 1), or what is counted: "rows", "nats a token", "ms", "s", "bytes".
        words: what it is: a label for axes and lists, and what else is to be said behind a colon.
        top: the largest value there can be; None where there is none.
    """

    key: str
    short: str
    better: str
    format: Format
    unit: str
    words: str
    top: float | None = None

    @property
    def head(self) -> str:
        """Head of a column of such numbers, with their unit."""
        return f"{self.short} {self.format.unit}".strip()

    @property
    def label(self) -> str:
        """What it is, for an axis or in a list to choose from."""
        return self.words.partition(": ")[0]

    def __call__(self, value: float | None, missing: str = "-") -> str:
        """Return the text of a value, as `format` writes it."""
        return self.format(value, missing)


def _share(key: str, short: str, better: str, format: Format, words: str, top: float | None = 1.0) -> Measure:
    return Measure(key, short, better, format, "share", words, top)


def _rows(key: str, short: str, better: str, words: str, format: Format = COUNT) -> Measure:
    return Measure(key, short, better, format, "rows", words)


# Shares are of the context at each step. With fewer than k indexed rows, recall@k is of all of them. What a selector
# does not report (scanned, scan_bytes) is NaN, null in JSON, and so is what a head has none of (lookup_hits without
# lookups), or a budget (promised without a mass).
_REPLAY = (
    _share("recall@{k}", "R@{k}", HIGH, FRACTION, "recall of the {k} best rows: of the exact ones among indexed rows"),
    _share("mass", "mass", HIGH, Format(3), "attention mass: on the rows attended, sink and window included"),
    _share("indexed_mass", "far", HIGH, FRACTION, "attention beyond sink and window: of the head, not of the method"),
    _share("recovered", "recovered", HIGH, FRACTION, "recovered share of the far attention: of that on indexed rows"),
    _rows(
        "lookups", "sought", HIGH, f"lookups per token: indexed rows with {LOOKUP:.0%} of the weight or more", FRACTION
    ),
    _share("lookup_hits", "lookups", HIGH, FRACTION, "share of the lookups that are selected"),
    _share("relative_error", "error", LOW, PERCENT, "relative output error: norm over that of full attention's", None),
    _share(
        *("denominator_error", "denominator", LOW, PERCENT),
        "relative error of the softmax's denominator: of a sample what it estimates, of other choices what they miss",
        None,
    ),
    Measure("mse", "MSE", LOW, SIGNIFICANT, "", "mean squared error of the output's components"),
    _rows("attended", "rows", LOW, "rows attended per query head: those in its softmax"),
    _share("attended_share", "rows", LOW, PERCENT, "rows attended (% of context)"),
    _rows("kept", "kept", LOW, "rows chosen per query head: beyond sink, window and rows that wait to be sealed"),
    _rows("oracle_kept", "oracle", LOW, "fewest rows that hold the mass: of a budget by mass, for a query head"),
    _share("promised", "promised", HIGH, Format(3), "share held by the method's estimate: of a budget by mass"),
    _share("fulfilled", "fulfilled", HIGH, FRACTION, "tokens at which the mass is held: of a budget by mass"),
    _rows("distinct_rows", "distinct", LOW, "distinct rows read by the query heads of a KV head"),
    _rows("scanned", "scanned", LOW, "rows or representatives scored to choose"),
    _share("scanned_share", "scan", LOW, PERCENT, "rows scored (% of context): to choose", None),
    _share("bytes_share", "bytes", LOW, PERCENT, "bytes read (% of cache): to choose and to attend", None),
)
_RECALL = (
    _share("recall", "recall", HIGH, FRACTION, "recall: share of the exact top-k keys that are found"),
    Measure("select_ms", "ms", LOW, SIGNIFICANT, "ms", "milliseconds a choice"),
    Measure("build_seconds", "build s", LOW, SIGNIFICANT, "s", "seconds to build the index of a layer"),
    Measure("index_bytes_per_key", "index B/key", LOW, COUNT, "bytes", "bytes of the index per key and KV head"),
)
# With fewer rows, or pages, than a name says, a measure is of all of them. What a head has none of is NaN, null in
# JSON: an overlap where fewer tokens came before, or a slack where all logits are equal. `far` attention is that on
# rows beyond sink and window.
_PAGE_ROWS = f"share of the attention on whole pages of {{k}} rows that is in the {NEEDED} rows of pages with the"
_INSPECT = (
    Measure("query_distance", "query", "", Format(1), "", "Mahalanobis distance of queries from the far keys, mean"),
    Measure("key_distance", "key", "", Format(1), "", "Mahalanobis distance of the tokens' keys from far keys, mean"),
    Measure("distance_ratio", "ratio", "", FRACTION, "", "distance of queries over that of keys: 1 if alike"),
    _share("far_mass", "far", "", PERCENT, "share of the attention on far rows: `indexed_mass` with a seal of 1"),
    _rows("needed", "needed", "", f"fewest far rows that hold {HELD:.0%} of the far attention"),
    _share("top_share@{k}", "top {k}", "", WHOLE_PERCENT, "share of the far attention that the {k} best rows hold"),
    _share("overlap@1", "last", "", WHOLE_PERCENT, f"share of the {NEEDED} best far rows that the token before needed"),
    _share(
        *("overlap@{k}", "last {k}", "", WHOLE_PERCENT),
        f"share of the {NEEDED} best far rows that one of the {{k}} tokens before needed",
    ),
    _rows("rows@{k}", "rows of {k}", "", f"different rows among the {NEEDED} best of {{k}} tokens"),
    Measure(
        *("slack@{k}", "slack {k}", "", Format(1), ""),
        "Quest's bound less the largest logit of the page, mean over pages of {k} rows, in standard deviations of the "
        "logits",
    ),
    Measure(
        *("rank@{k}", "rank {k}", "", FRACTION, ""),
        "rank correlation (Spearman) of bound and largest logit over pages of {k} rows",
        1.0,
    ),
    _share(
        *("hits@{k}", "hits {k}", "", WHOLE_PERCENT),
        f"share of the {BEST} pages of {{k}} rows with the largest logits that are among the {BEST} with the highest "
        f"bounds",
    ),
    _share("best_share@{k}", "best {k}", "", WHOLE_PERCENT, f"{_PAGE_ROWS} largest logits"),
    _share(
        *("bound_share@{k}", "bound {k}", "", WHOLE_PERCENT),
        f"{_PAGE_ROWS} highest bounds: what `evaluate` calls `recovered`, of quest:page={{k}},group=each",
    ),
)
_EVAL = (
    _share("score", "score", HIGH, WHOLE_PERCENT, "score"),
    _share("ruler", "RULER", HIGH, WHOLE_PERCENT, "RULER's string match"),
    _rows("rows", "rows", LOW, "rows read per query head of a sparse layer"),
    Measure("kl", "KL", LOW, Format(4), "nats a token", "KL divergence, nats per token: from full attention"),
    _share("same_top", "top-1", HIGH, PERCENT, "top-1 agreement: share of tokens with the same most likely next token"),
    Measure("nll_difference", "delta NLL", LOW, Format(4), "nats a token", "increase of the NLL, nats per token"),
    Measure("perplexity", "perplexity", LOW, Format(3), "", "perplexity"),
    Measure("first_token_seconds", "s", LOW, Format(2), "s", "s to the first token"),
    Measure("token_milliseconds", "ms", LOW, Format(1), "ms", "ms a token behind the first"),
    Measure("prompts", "prompts", "", COUNT, "", "prompts"),
)
_OTHERS = (
    _share("bytes_heads", "bytes", LOW, PERCENT, "bytes read (% of the layer's cache)", None),
    _share("error_heads", "error", LOW, PERCENT, "relative output error", None),
    Measure("missed", "heads missed", LOW, COUNT, "", "heads missed"),
    Measure("wins", "heads won", HIGH, COUNT, "", "heads won"),
)
_TABLE = {row.key: row for row in (*_REPLAY, *_RECALL, *_INSPECT, *_EVAL, *_OTHERS)}


def measure(key: str) -> Measure:
    """Return the measure that records name `key`, such as "bytes_share" or "recall@10".

    Raises:
        KeyError: no record holds such a number.
    """
    name, at, number = key.partition("@")
    if not at or key in _TABLE:
        return _TABLE[key]
    row = _TABLE[f"{name}@{{k}}"]
    return replace(row, key=key, short=row.short.format(k=number), words=row.words.format(k=number))


def measures(keys: Iterable[str]) -> tuple[Measure, ...]:
    """Return the measures of several names, in their order."""
    return tuple(map(measure, keys))
