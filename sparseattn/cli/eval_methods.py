"""The methods that `eval` compares: full attention, and selectors and roles in sets of layers at every budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sparseattn.cache import input_checks
from sparseattn.cache.shown_rows import check_seal
from sparseattn.cli import values
from sparseattn.cli.options import ALL_LAYERS
from sparseattn.codecs.base import RowCodec
from sparseattn.core.budget import budget_label, budget_of, budget_order
from sparseattn.evaluation.tasks.run import Method
from sparseattn.roles.roles import Method as Sparse
from sparseattn.roles.roles import Roles
from sparseattn.selectors.base import Selector
from sparseattn.selectors.baselines.native import NATIVE, Native
from sparseattn.selectors.registry import make_selector

MOST_LAYERS = 9999  # far beyond any model's


def layer_set(text: str) -> tuple[int, ...] | None:
    """Return `"0-3,9"` as numbers in order; None for "all". Raises ValueError naming the option."""
    if text == ALL_LAYERS:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and bool(dash) == bool(last)) or (
            dash and int(first) > int(last)
        ):
            raise ValueError(
                f'--sparse-layers takes layers and ranges separated by commas, such as "0-9,12", or '
                f"{ALL_LAYERS}, got {text!r}"
            )
        if int(last or first) > MOST_LAYERS:
            raise ValueError(f"--sparse-layers must be numbers up to {MOST_LAYERS}, got {text!r}")
        layers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(layers))


def methods(
    specs: Sequence[str],
    text: str,
    counts: Sequence[int],
    layers: Sequence[str] = (ALL_LAYERS,),
    roles: Sequence[Roles] = (),
    codecs: Sequence[RowCodec | None] = (None,),
    seal: int | None = None,
) -> list[Method]:
    """Return full attention, and every selector, and all roles, with rows kept by all `codecs`, in every set of
    layers at every budget; what does not look at its budget, once. A method that cannot do with a codec goes without
    it, where rows as they come are asked for too.

    Args:
        specs: the selectors, as texts.
        text: the budgets, separated by commas.
        counts: tokens of contexts, ascending, which shares of the context are of.
        layers: sets of layers, as texts.
        roles: compared too.
        codecs: of rows; None: as they come.
        seal: rows that wait before sealing.

    Raises:
        ValueError: no such selector or budget, a budget below a selector's span, two selectors of one label, one that
            no asked codec serves, or a `seal` below a unit.
    """
    budgets = sorted(values.budgets(text), key=lambda budget: budget_order(budget, counts[-1]))
    sets = list(dict.fromkeys(map(layer_set, layers)))
    compared = [Method()]
    sources: dict[str, str] = {}  # of labels
    sparse: list[Sparse] = [*(Native() if spec == NATIVE else make_selector(spec) for spec in specs), *roles]
    for method in sparse:
        source = f"{method!r} of {method.source()}"
        if sources.setdefault(method.label(), source) != source:
            raise ValueError(f"two selectors have the name {method.label()}: {sources[method.label()]} and {source}")
        selectors = [role.selector for role in method.distinct()] if isinstance(method, Roles) else [method]
        served = _served(selectors, codecs)
        if seal is not None:
            for selector, codec in itertools.product(selectors, served):
                check_seal(selector, seal, codec)
        # Outside the budgets, as an index is built for a set of layers.
        for where, codec in itertools.product(sets, served):
            for budget in budgets if _has_budget(method) else [None]:
                if isinstance(method, Roles):
                    method.check_budget(budget, counts[0])
                else:
                    budget_of(method, budget, counts[0])
                written = budget_label(budget) if _has_budget(method) else None
                compared.append(Method(method, budget, written, where, codec))
    return list({(method.label, method.written, method.layers): method for method in compared}.values())


def _has_budget(method: Sparse) -> bool:
    """Whether a method reads as much as it is told; a model's own index decides by itself."""
    return method.uses_budget and not isinstance(method, Native)


def _served(selectors: Sequence[Selector], codecs: Sequence[RowCodec | None]) -> list[RowCodec | None]:
    """Return the codecs of rows that serve all selectors; ValueError where there are none."""
    served: list[RowCodec | None] = []
    refused: list[ValueError] = []
    for codec in codecs:
        try:
            if codec is not None:
                for selector in selectors:
                    if isinstance(selector, Native):
                        raise ValueError(f"native reads rows as they came, and none are kept by {codec}: leave it out")
                    input_checks.check_codec(selector, codec, False)
            served.append(codec)
        except ValueError as error:
            refused.append(error)
    if not served:
        raise refused[0]
    return served
