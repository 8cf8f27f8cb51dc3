"""Which layers of a model are to be sparse, and whether what is asked for fits them: the checks of `SparseCache`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparseattn.attention import decode
from sparseattn.budget import Budget, budget_rows
from sparseattn.cache import KVCache
from sparseattn.integrations.errors import ModelError
from sparseattn.integrations.layers import AttentionLayer
from sparseattn.integrations.routing import name_of
from sparseattn.integrations.upstream import DynamicLayer
from sparseattn.selectors import Selector


def dense_layers(given: int | Sequence[int], layers: int) -> tuple[int, ...]:
    """The layers to stay dense, in order; else ValueError."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= layers:
        return tuple(range(given))
    if isinstance(given, Sequence) and not isinstance(given, str) and set(given) <= set(range(layers)):
        return tuple(sorted(set(given)))
    raise ValueError(
        f"dense_layers is how many of the first layers stay dense, 0 to {layers}, or a list of layers, got {given!r}"
    )


def sparse_layers(
    model: Any, layers: Sequence[Any], found: Mapping[int, AttentionLayer], dense: Sequence[int]
) -> list[int]:
    """The layers to be sparse: those that attend to the whole context and are not to stay dense; else ModelError."""
    able = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    able = [i for i in able if i not in found or found[i].window is None]
    if not able:
        raise ModelError(f"{name_of(model)} has no layer that attends to the whole context: there is nothing to select")
    sparse = [i for i in able if i not in dense]
    for i in sparse:
        if i not in found:
            raise ModelError(f"layer {i} of {name_of(model)} has no attention that can be routed: make it dense")
        if (beyond := found[i].beyond) is not None:
            raise ModelError(
                f"layer {i} of {name_of(model)} {beyond}, which sparse attention does not compute: name such layers in "
                f"dense_layers, or use another model"
            )
    return sparse


def check_mapping(name: str, given: Any, sparse: Sequence[int]) -> None:
    """A mapping from layers covers the sparse ones and names no others; else ValueError."""
    if not isinstance(given, Mapping):
        return
    strange = [key for key in given if key != "default" and key not in sparse]
    lacking = [i for i in sparse if i not in given and "default" not in given]
    if strange or lacking:
        raise ValueError(
            f"{name} by layer names sparse layers ({', '.join(map(str, sparse))}) and 'default' for the others; "
            + (f"{strange[0]!r} is none of them" if strange else f"layer {lacking[0]} is missing")
        )


def of_layer(given: Any, index: int) -> Any:
    """What `given`, one value or a mapping by layer, says of a layer."""
    return given.get(index, given.get("default")) if isinstance(given, Mapping) else given


def check_budget(index: int, budget: Budget, selector: Selector) -> None:
    """A budget fits a layer's selector; else ValueError."""
    try:
        budget_rows(budget, 1, selector.span, repr(selector))
    except ValueError as error:
        raise ValueError(f"layer {index}: {error}") from error


def try_out(
    selector: Selector, what: AttentionLayer, budget: Budget, apart: torch.device | str | None, impl: str | None
) -> None:
    """One decode over a few random rows of a layer's shape: what does not fit raises now."""
    if selector.foresees:
        raise ValueError(
            f"{selector!r} goes by the input of the layer before, which layers of a model are not told: evaluate it on "
            f"traces made with `sparseattn capture --ahead`, or make the layer dense"
        )
    count = max(selector.unit, 16)
    draw = torch.Generator().manual_seed(0)
    shape = (1, what.heads, count, what.size)
    rows = torch.randn(2 + what.group, *shape, generator=draw).to(what.device, what.dtype)
    trial = KVCache(selector, sink=0, window=0, seal=count, sealed_device=apart, check=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what so few rows lack
        trial.append(rows[0], rows[1], rows[2:].movedim(0, 2))
        decode(rows[2:, :, :, 0].movedim(0, 2), trial, budget, scale=what.scale, impl=impl)
