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
        label: of an axis, or in a list to choose from.
        better: `HIGH`, `LOW`, or nothing where neither is.
        format: in a table's cell.
        unit: "share" (of 1), or what is counted: "rows", "nats a token", "ms", "s", "bytes".
        top: the largest value there can be; None where there is none.
        words: what it is in full; `label` where that says it all.
    """

    key: str
    short: str
    label: str
    better: str = ""
    format: Format = SIGNIFICANT
    unit: str = ""
    top: float | None = None
    words: str = ""

    @property
    def head(self) -> str:
        """Head of a column of such numbers, with their unit."""
        return f"{self.short} {self.format.unit}".strip()

    @property
    def about(self) -> str:
        """What it is in full."""
        return self.words or self.label

    def __call__(self, value: float | None, missing: str = "-") -> str:
        """Return the text of a value, as `format` writes it."""
        return self.format(value, missing)


def _share(
    key: str,
    short: str,
    label: str,
    better: str = "",
    format: Format = PERCENT,
    *,
    top: float | None = 1.0,
    **more: str,
) -> Measure:
    return Measure(key, short, label, better, format, "share", top, **more)


# Shares are of the context at each step. With fewer than k indexed rows, recall@k is of all of them. What a selector
# does not report (scanned, scan_bytes) is NaN, null in JSON, and so is what a head has none of (lookup_hits without
# lookups), or a budget (promised without a mass).
_REPLAY = (
    _share(
        "recall@{k}",
        "R@{k}",
        "recall of the {k} best rows",
        HIGH,
        FRACTION,
        words="share of the exact top-{k} rows, among indexed rows, that are selected",
    ),
    _share(
        "mass",
        "mass",
        "recovered attention mass",
        HIGH,
        Format(3),
        words="share of full attention's weight on the rows attended, sink and window included",
    ),
    _share(
        "indexed_mass",
        "far",
        "attention beyond sink and window",
        HIGH,
        FRACTION,
        words="share of full attention's weight on the indexed rows: a property of the head, not of the method",
    ),
    _share(
        "recovered",
        "recovered",
        "share recovered of the far attention",
        HIGH,
        FRACTION,
        words="share of the weight on indexed rows that the selected rows hold",
    ),
    Measure(
        "lookups",
        "lookups of head",
        f"indexed rows with {LOOKUP:.0%} or more of full attention's weight, per token: of the head",
        HIGH,
        FRACTION,
        "rows",
    ),
    _share("lookup_hits", "lookups", "share of the lookups that are selected", HIGH, FRACTION),
    _share(
        "relative_error",
        "error",
        "relative output error",
        LOW,
        top=None,
        words="norm of the output's error over the norm of full attention's output",
    ),
    _share(
        "denominator_error",
        "denominator",
        "relative error of the softmax's denominator",
        LOW,
        top=None,
        words="relative error of the softmax's denominator: of a sample what it estimates, of other choices what they "
        "miss",
    ),
    Measure("mse", "MSE", "mean squared error of the output's components", LOW),
    Measure(
        "attended",
        "rows",
        "rows attended per query head",
        LOW,
        COUNT,
        "rows",
        words="rows in the softmax of a query head",
    ),
    _share("attended_share", "rows", "rows attended / rows of the context", LOW),
    Measure(
        "kept",
        "kept",
        "rows chosen per query head",
        LOW,
        COUNT,
        "rows",
        words="rows that were chosen: beyond sink, window and rows that wait to be sealed",
    ),
    Measure(
        "oracle_kept",
        "oracle",
        "fewest rows that hold the mass",
        LOW,
        COUNT,
        "rows",
        words="of a budget by mass, the fewest rows to choose with which a query head holds it",
    ),
    _share(
        "promised",
        "promised",
        "share held by the method's estimate",
        HIGH,
        Format(3),
        words="of a budget by mass, the share that the rows attended hold by the method's estimate",
    ),
    _share(
        "fulfilled",
        "fulfilled",
        "tokens at which the mass is held",
        HIGH,
        FRACTION,
        words="of a budget by mass, the share of tokens at which the rows attended hold it",
    ),
    Measure(
        "distinct_rows",
        "distinct",
        "distinct rows read by the query heads of a KV head",
        LOW,
        COUNT,
        "rows",
    ),
    Measure("scanned", "scanned", "rows or representatives scored to choose", LOW, COUNT, "rows"),
    _share("scanned_share", "scan", "rows scored / rows of the context", LOW, top=None),
    _share(
        "bytes_share",
        "bytes",
        "bytes read / bytes of the cache",
        LOW,
        top=None,
        words="bytes read, to choose and to attend, over the bytes of the whole cache",
    ),
)
_RECALL = (
    _share("recall", "recall", "recall", HIGH, FRACTION, words="share of the exact top-k keys that are found"),
    Measure("select_ms", "ms", "milliseconds a choice", LOW, SIGNIFICANT, "ms"),
    Measure("build_seconds", "build s", "seconds to build the index of a layer", LOW, SIGNIFICANT, "s"),
    Measure("index_bytes_per_key", "index B/key", "bytes of the index per key and KV head", LOW, COUNT, "bytes"),
)
# With fewer rows, or pages, than a name says, a measure is of all of them. What a head has none of is NaN, null in
# JSON: an overlap where fewer tokens came before, or a slack where all logits are equal. `far` attention is that on
# rows beyond sink and window.
_INSPECT = (
    Measure(
        "query_distance",
        "query",
        "Mahalanobis distance of the tokens' queries from the far keys before them, mean",
        format=Format(1),
    ),
    Measure(
        "key_distance",
        "key",
        "Mahalanobis distance of the tokens' own keys from those far keys, mean",
        format=Format(1),
    ),
    Measure(
        "distance_ratio",
        "ratio",
        "distance of queries over that of keys: 1 where queries are distributed as keys are",
        format=FRACTION,
    ),
    _share(
        "far_mass",
        "far",
        "share of the attention on far rows",
        words="share of the attention on far rows; `indexed_mass` of `evaluate` with a seal of 1",
    ),
    Measure("needed", "needed", f"fewest far rows that hold {HELD:.0%} of the far attention", "", COUNT, "rows"),
    _share("top_share@{k}", "top {k}", "share of the far attention that the {k} best rows hold", "", WHOLE_PERCENT),
    _share(
        "overlap@1",
        "last",
        f"share of the {NEEDED} best far rows that were among those of the token before",
        "",
        WHOLE_PERCENT,
    ),
    _share(
        "overlap@{k}",
        "last {k}",
        f"share of the {NEEDED} best far rows that were among those of one of the {{k}} tokens before",
        "",
        WHOLE_PERCENT,
    ),
    Measure("rows@{k}", "rows of {k}", f"different rows among the {NEEDED} best of {{k}} tokens", "", COUNT, "rows"),
    Measure(
        "slack@{k}",
        "slack {k}",
        "Quest's bound less the largest logit of the page, mean over pages of {k} rows, in standard deviations of the "
        "logits",
        format=Format(1),
    ),
    Measure(
        "rank@{k}",
        "rank {k}",
        "rank correlation (Spearman) of bound and largest logit over pages of {k} rows",
        format=FRACTION,
        top=1.0,
    ),
    _share(
        "hits@{k}",
        "hits {k}",
        f"share of the {BEST} pages of {{k}} rows with the largest logits that are among the {BEST} with the highest "
        f"bounds",
        "",
        WHOLE_PERCENT,
    ),
    _share(
        "best_share@{k}",
        "best {k}",
        f"share of the attention on whole pages of {{k}} rows that is in the {NEEDED} rows of pages with the largest "
        f"logits",
        "",
        WHOLE_PERCENT,
    ),
    _share(
        "bound_share@{k}",
        "bound {k}",
        f"share of the attention on whole pages of {{k}} rows that is in the {NEEDED} rows of pages with the highest "
        f"bounds",
        "",
        WHOLE_PERCENT,
        words=f"share of the attention on whole pages of {{k}} rows that is in the {NEEDED} rows of pages with the "
        f"highest bounds: what `evaluate` calls `recovered`, of quest:page={{k}},group=each",
    ),
)
_EVAL = (
    _share("score", "score", "score", HIGH, WHOLE_PERCENT),
    _share("ruler", "RULER", "RULER's string match", HIGH, WHOLE_PERCENT),
    Measure("rows", "rows", "rows read per query head of a sparse layer", LOW, COUNT, "rows"),
    Measure("kl", "KL", "KL, nats a token", LOW, Format(4), "nats a token"),
    _share("same_top", "same top", "likeliest tokens the same", HIGH),
    Measure("nll_difference", "NLL more", "growth of the NLL, nats a token", LOW, Format(4), "nats a token"),
    Measure("perplexity", "perplexity", "perplexity", LOW, Format(3)),
    Measure("first_token_seconds", "s", "s to the first token", LOW, Format(2), "s"),
    Measure("token_milliseconds", "ms", "ms a token behind the first", LOW, Format(1), "ms"),
    Measure("prompts", "prompts", "prompts", "", COUNT),
)
_OTHERS = (
    _share("bytes_heads", "bytes", "bytes read, of the layer's", LOW, top=None),
    _share("error_heads", "error", "relative output error", LOW, top=None),
    Measure("missed", "heads missed", "heads missed", LOW, COUNT),
    Measure("wins", "heads won", "heads won", HIGH, COUNT),
)
_TABLE = {one.key: one for one in (*_REPLAY, *_RECALL, *_INSPECT, *_EVAL, *_OTHERS)}


def measure(key: str) -> Measure:
    """Return the measure that records name `key`, such as "bytes_share" or "recall@10".

    Raises:
        KeyError: no record holds such a number.
    """
    name, at, number = key.partition("@")
    if not at or key in _TABLE:
        return _TABLE[key]
    found = _TABLE[f"{name}@{{k}}"]
    texts = {field: getattr(found, field).format(k=number) for field in ("short", "label", "words")}
    return replace(found, key=key, **texts)


def measures(keys: Iterable[str]) -> tuple[Measure, ...]:
    """Return the measures of several names, in their order."""
    return tuple(map(measure, keys))
