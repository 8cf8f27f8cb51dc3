"""What the explorer of a page shows where no option says it: the methods and settings of the bench folder beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseattn.cli.report_options import EXPLORED, SINK, WINDOW, Explored, ReportOptions
from sparseattn.core.budget import parse_budget
from sparseattn.reporting import equal_cost
from sparseattn.reporting.html.starting_methods import MOST
from sparseattn.reporting.replay_tables import CONTROLS
from sparseattn.selectors.registry import SELECTORS, make_selector
from sparseattn.selectors.trust import named_modules


def explored(options: ReportOptions, records: Sequence[dict[str, Any]]) -> tuple[Explored, list[str]]:
    """Return what the explorer shows, and the measured methods that it leaves out because their code would run.

    Args:
        records: of `bench`, checked; those of the traces that are explored come first in importance.
    """
    names = {name for trace in options.trace or () for name in (trace, Path(trace).name, Path(trace).stem)}
    measured = [record for record in records if record["trace"] in names] or list(records)
    labels = list(dict.fromkeys(str(record["label"]) for record in measured if record["label"] not in CONTROLS))
    own = [label for label in labels if named_modules([label])]
    known = [label for label in labels if label not in own and _explorable(label)][:MOST]
    budgets = [parse_budget(record["budget"]) for record in measured] or [equal_cost.ROWS]
    first: dict[str, Any] = measured[0] if measured else {}
    return Explored(
        options.trace or (),
        options.selector or known or EXPLORED,
        equal_cost.chosen_rows(None, budgets) if options.budget is None else parse_budget(options.budget),
        options.queries,
        options.layer_numbers,
        first.get("sink", SINK) if options.sink is None else options.sink,
        first.get("window", WINDOW) if options.window is None else options.window,
        options.device,
    ), [] if options.selector else own


def _explorable(label: str) -> bool:
    """Whether a label is the text of a registered method, not of roles, of rows in a codec or of another version."""
    if label.partition(":")[0] not in SELECTORS:
        return False
    try:
        make_selector(label)
    except (ValueError, ImportError):
        return False
    return True
