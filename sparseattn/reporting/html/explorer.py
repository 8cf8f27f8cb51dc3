"""The section that shows what single tokens attend to, over their text, and which rows methods read of it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

from torch import Tensor

from sparseattn.core.budget import budget_label
from sparseattn.evaluation.token_explorer import DECADES, SHARE, Exploration
from sparseattn.reporting.html.views import Explorer, Heat, Section, Subject, View, axis

FAR = 0.2  # of a head's attention beyond sink and window, for the explorer to open at it


def section(number: int, explored: Exploration, pieces: Sequence[str] | None, model: str | None = None) -> Section:
    """Return the section of one trace of a model; `number` tells several apart, `pieces` is its text, one per token."""
    data = {
        "trace": explored.trace,
        "tokens": list(explored.tokens),
        "rows": explored.levels.shape[-1],
        "layers": list(explored.layers),
        "heads": explored.heads,
        "sink": explored.sink,
        "window": explored.window,
        "budget": budget_label(explored.budget),
        "decades": DECADES,
        "part": SHARE,
        "pieces": None if pieces is None else list(pieces),
        "counts": explored.needed.flatten().tolist(),
        "far": explored.readings[0].measured["indexed_mass"].flatten().tolist(),
        "levels": _text(explored.levels),
        "methods": [
            {
                "label": reading.label,
                "page": reading.page,
                "rows": _text(reading.rows),
                **{
                    short: reading.measured[name].flatten().tolist()
                    for short, name in (("error", "relative_error"), ("mass", "mass"), ("attended", "attended"))
                },
            }
            for reading in explored.readings
        ],
        "start": _start(explored),
    }
    note = (
        f"Weights are kept in 8 bits, to about 3 %; a weight below {10**-DECADES:.3%} counts as 0. The tokens that a "
        f"head needs are the fewest that hold {SHARE:.0%} of its attention."
    )
    name = "explorer" if number == 0 else f"explorer-{number + 1}"
    view = Explorer("One token's attention", data, note)
    methods = tuple(reading.label for reading in explored.readings)
    views: list[View] = [view, _needs(explored)]
    about = Subject(() if model is None else (model,), (explored.levels.shape[-1],), (explored.trace,))
    return Section(name, f"Attention explorer: {explored.trace}", [_finding(explored)], views, methods, about)


def _text(bytes_of: Tensor) -> str:
    """Return a tensor of bytes as text: deflated, in base64."""
    return base64.b64encode(zlib.compress(bytes_of.contiguous().numpy().tobytes(), 9)).decode()


def _needs(explored: Exploration) -> Heat:
    """Return the rows needed by each head, and how far it looks, on average over the tokens."""
    measures = (
        axis("needed", label=f"fewest tokens that hold {SHARE:.0%} of the attention", log=True),
        axis("indexed_mass", better=""),
    )
    far = explored.readings[0].measured["indexed_mass"]
    panel = {
        "method": None,
        "choice": {},
        "columns": list(range(explored.heads)),
        "rows": list(explored.layers),
        "values": {"needed": explored.needed.double().mean(0).tolist(), "indexed_mass": far.mean(0).tolist()},
    }
    note = (
        f"Rows are layers, columns are query heads; each cell is the mean over the last {len(explored.tokens)} tokens."
    )
    return Heat("What each head needs", "query head", "layer", (), measures, [panel], note=note)


def _start(explored: Exploration) -> dict[str, int]:
    """Return where the explorer opens: the method that errs most, at its worst head of the last token, of those that
    look far."""
    errors = [float(reading.measured["relative_error"].mean()) for reading in explored.readings]
    method = max(range(len(errors)), key=errors.__getitem__)
    worst = explored.readings[method].measured["relative_error"][-1].clone()  # [L,H*G]
    far = explored.readings[method].measured["indexed_mass"][-1]
    if bool((far >= FAR).any()):
        worst[far < FAR] = -1.0
    at = int(worst.argmax())
    return {
        "method": method,
        "token": len(explored.tokens) - 1,
        "layer": at // explored.heads,
        "head": at % explored.heads,
    }


def _finding(explored: Exploration) -> str:
    (first, mass), *others = [(reading.label, float(reading.measured["mass"].mean())) for reading in explored.readings]
    captured = f"{first} captures {mass:.0%} of the attention" + "".join(
        f", {name} {mass:.0%}" for name, mass in others
    )
    needed = explored.needed.double().flatten()
    low, middle, high = (round(float(needed.quantile(q))) for q in (0.1, 0.5, 0.9))
    return (
        f"In the last {len(explored.tokens)} tokens of {explored.trace}, the median head puts {SHARE:.0%} of its "
        f"attention on {middle:,} tokens (80% of heads: {low:,} to {high:,}). With a budget of "
        f"{budget_label(explored.budget)}, {captured} on average."
    )
