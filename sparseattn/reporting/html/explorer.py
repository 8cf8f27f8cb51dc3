"""The section that shows what single tokens attend to, over their text, and which rows methods read of it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

from torch import Tensor

from sparseattn.core.budget import budget_label
from sparseattn.evaluation.token_explorer import DECADES, SHARE, Exploration
from sparseattn.reporting.html.views import Explorer, Heat, Section, View, axis

FAR = 0.2  # of a head's attention beyond sink and window, for the explorer to open at it


def section(number: int, found: Exploration, pieces: Sequence[str] | None) -> Section:
    """One trace's; `number` tells several apart, `pieces` is its text, a piece a token."""
    data = {
        "trace": found.trace,
        "tokens": list(found.tokens),
        "rows": found.levels.shape[-1],
        "layers": list(found.layers),
        "heads": found.heads,
        "sink": found.sink,
        "window": found.window,
        "budget": budget_label(found.budget),
        "decades": DECADES,
        "part": SHARE,
        "pieces": None if pieces is None else list(pieces),
        "counts": found.needed.flatten().tolist(),
        "far": found.readings[0].measured["indexed_mass"].flatten().tolist(),
        "levels": _text(found.levels),
        "methods": [
            {
                "label": one.label,
                "page": one.page,
                "rows": _text(one.rows),
                **{
                    short: one.measured[name].flatten().tolist()
                    for short, name in (("error", "relative_error"), ("mass", "mass"), ("attended", "attended"))
                },
            }
            for one in found.readings
        ],
        "start": _start(found),
    }
    note = (
        f"Weights are kept in 8 bits, to about 3 %; what is below {10**-DECADES:.0e} counts as nothing. The rows "
        f"needed are the fewest that hold {SHARE:.0%} of a head's attention."
    )
    name = "explorer" if number == 0 else f"explorer-{number + 1}"
    view = Explorer(f"{found.trace}: one token's attention", data, note)
    methods = tuple(one.label for one in found.readings)
    views: list[View] = [view, _needs(found)]
    return Section(name, f"What tokens of {found.trace} attend to", [_said(found)], views, methods)


def _text(bytes_of: Tensor) -> str:
    """A tensor of bytes as text: deflated, in base64."""
    return base64.b64encode(zlib.compress(bytes_of.contiguous().numpy().tobytes(), 9)).decode()


def _needs(found: Exploration) -> Heat:
    """Rows needed by each head, and how far it looks, in the mean over the tokens."""
    measures = (
        axis("needed", label=f"fewest rows that hold {SHARE:.0%} of the attention", log=True),
        axis("indexed_mass", better=""),
    )
    far = found.readings[0].measured["indexed_mass"]
    panel = {
        "method": None,
        "choice": {},
        "columns": list(range(found.heads)),
        "rows": list(found.layers),
        "values": {"needed": found.needed.double().mean(0).tolist(), "indexed_mass": far.mean(0).tolist()},
    }
    note = f"A row a layer, a column a query head; the mean over the last {len(found.tokens)} tokens."
    return Heat("What each head needs", "query head", "layer", (), measures, [panel], note=note)


def _start(found: Exploration) -> dict[str, int]:
    """Where the explorer opens: the method that errs most, at its worst head of the last token among those that look
    far."""
    errors = [float(one.measured["relative_error"].mean()) for one in found.readings]
    method = max(range(len(errors)), key=errors.__getitem__)
    worst = found.readings[method].measured["relative_error"][-1].clone()  # [L,H*G]
    far = found.readings[method].measured["indexed_mass"][-1]
    if bool((far >= FAR).any()):
        worst[far < FAR] = -1.0
    at = int(worst.argmax())
    return {
        "method": method,
        "token": len(found.tokens) - 1,
        "layer": at // found.heads,
        "head": at % found.heads,
    }


def _said(found: Exploration) -> str:
    held = [f"{one.label} {float(one.measured['mass'].mean()):.0%}" for one in found.readings]
    needed = found.needed.double().flatten()
    low, middle, high = (round(float(needed.quantile(q))) for q in (0.1, 0.5, 0.9))
    return (
        f"{found.trace}, the last {len(found.tokens)} tokens: {SHARE:.0%} of the attention lies on {middle:,} rows in "
        f"the median head, on {low:,} to {high:,} in eight of ten. At budget {budget_label(found.budget)} the rows "
        f"read hold of it, in the mean: {', '.join(held)}."
    )
