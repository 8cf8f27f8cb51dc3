"""Which layers of a model are to be sparse, and whether what is asked for fits them: the checks of `SparseCache`."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sparseattn.core.budget import Budget, budget_of
from sparseattn.models.attention_layers import AttentionLayer
from sparseattn.models.attention_routing import name_of
from sparseattn.models.errors import ModelError
from sparseattn.models.native_index import INDEX_KEYS
from sparseattn.models.tensor_parallel import HeadShare
from sparseattn.models.transformers_classes import DynamicLayer
from sparseattn.roles.fingerprint import fingerprint
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import Share
from sparseattn.roles.roles import Roles, ranges
from sparseattn.selectors.baselines.native import NATIVE


def dense_layers(given: int | Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the layers to stay dense, in order; ValueError for anything but a count or layers of the model."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= layers:
        return tuple(range(given))
    if isinstance(given, Sequence) and not isinstance(given, str) and set(given) <= set(range(layers)):
        return tuple(sorted(set(given)))
    raise ValueError(
        f"dense_layers is how many of the first layers stay dense, 0 to {layers}, or a list of layers, got {given!r}"
    )


# What an argument of `SparseCache` would say beside `native=True`, and why nothing of the kind is done there.
_CHOSEN = "the model's own index chooses what is read"
_KEPT = "rows are kept as they came"
_UNSEALED = "no row is ever sealed, and any number of tokens can be taken back"
NOT_NATIVE = {
    **dict.fromkeys(("selector", "budget", "roles", "plan", "trusted", "sink", "window"), _CHOSEN),
    **dict.fromkeys(("sealed_device", "indexes", "rows", "context_group"), _KEPT),
    **dict.fromkeys(("seal", "rollback"), _UNSEALED),
    "check": "no selector is there whose choice could be checked",
}


def check_native(given: Mapping[str, object], function: Callable[..., Any]) -> None:
    """Refuse, by ValueError, arguments of `function` beside `native` that say nothing there.

    An argument counts as left out where it has its default: a default that somebody wrote down is not told from that.
    """
    parameters = inspect.signature(function).parameters
    for name, why in NOT_NATIVE.items():
        if name in given and given[name] != parameters[name].default:
            raise ValueError(f"beside native=True {why}: leave {name} out, got {given[name]!r}")


def head_share(model: Any, attention: Mapping[int, AttentionLayer], selector: object) -> HeadShare:
    """Return which heads of every layer this process has; ModelError where that does not go with a native index."""
    here = HeadShare.of(model, next(iter(attention.values())).heads) if attention else HeadShare()
    if selector == NATIVE and here.size > 1:
        raise ModelError(
            f"native=True decodes by an index that all heads share, and {here.size} processes share the heads of "
            f"{name_of(model)}: load it in one process"
        )
    return here


def loaded_roles(
    given: Roles | str | os.PathLike[str] | None, selector: object, trusted: Collection[str]
) -> Roles | None:
    """Return roles, or those of a file; ValueError where there is a selector beside them."""
    if given is not None and selector is not None:
        raise ValueError(f"roles name the selector of every layer: give them or a selector, got {selector!r} too")
    return given if given is None or isinstance(given, Roles) else Roles.load(given, trusted)


def check_plan_budget(plan: Plan, budget: object) -> None:
    """Refuse, by ValueError, a budget that a plan has no use for."""
    if not plan.uses_budget:
        raise ValueError(f"plan {plan.name} says what every layer reads: leave the budget out, got {budget!r}")


def planned(plan: Plan | str | os.PathLike[str], model: Any, beside: object, trusted: Collection[str] = ()) -> Plan:
    """Return the plan, read from its file if it is a path. It may name classes of `trusted` modules.

    Raises:
        ValueError: it was made for other weights, or `beside` it there are roles or a selector, which choose too.
    """
    weights = fingerprint(model.named_parameters()), name_of(model)
    made = plan if isinstance(plan, Plan) else Plan.load(plan, trusted, weights)
    if beside is not None:
        raise ValueError(
            f"plan {made.name} names the method of every layer: give it, roles or a selector, got {beside!r}"
        )
    made.check_model(*weights)
    return made


def dense_by_roles(
    roles: Roles,
    model: Any,
    layers: Sequence[Any],
    attention: Mapping[int, AttentionLayer],
    dense: Sequence[int],
    here: HeadShare,
) -> tuple[int, ...]:
    """Return the layers to stay dense, in order: those in `dense`, and those whose heads all are dense by their role.

    here: which heads of every layer this process has.

    Raises:
        ValueError: roles that do not fit the model: a layer that it does not have or that they leave out, another
            number of heads, or anything but dense for a layer that does not attend to the whole context.
    """
    if strange := [i for i in roles.layers if i >= len(layers)]:
        raise ValueError(
            f"roles {roles.name} name layers {ranges(roles.layers)}, and {name_of(model)} has {len(layers)}, 0 to "
            f"{len(layers) - 1}: layer {strange[0]} is none of them"
        )
    able = _whole_context(layers, attention)
    for i in able:
        if i in attention:  # what is not found cannot be sparse
            roles.shares(i, here.every(attention[i].heads))
    for i in roles.layers:
        if i not in able and not roles.dense(i):
            raise ValueError(
                f"roles {roles.name} are more than dense in layer {i}, which does not attend to the whole context in "
                f"{name_of(model)} and stays as it is: leave it out"
            )
    return tuple(sorted({*dense, *(i for i in roles.layers if roles.dense(i))}))


def _keeps_index(layer: Any) -> bool:
    """Whether a cache layer of transformers keeps the keys of an index beside keys and values."""
    return isinstance(layer, DynamicLayer) and any(hasattr(layer, name) for name in INDEX_KEYS)


def _whole_context(layers: Sequence[Any], attention: Mapping[int, AttentionLayer]) -> list[int]:
    """Return the layers that attend to the whole context, as far as is known."""
    able = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer or _keeps_index(layer)]
    return [i for i in able if i not in attention or attention[i].window is None]


def _kinds(layers: Sequence[Any], attention: Mapping[int, AttentionLayer]) -> str:
    """Return how many layers of which class a cache of transformers has, in words."""
    slide = {i for i, x in enumerate(layers) if type(x) is DynamicLayer and i in attention}  # others are not able
    kinds = Counter(f"{type(x).__name__}{' with a sliding window' if i in slide else ''}" for i, x in enumerate(layers))
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no layers"


def sparse_layers(
    model: Any, layers: Sequence[Any], attention: Mapping[int, AttentionLayer], dense: Sequence[int]
) -> list[int]:
    """Return the layers to be sparse: those that attend to the whole context and are not in `dense`.

    Raises:
        ModelError: there is no layer to select in, or one that sparse attention cannot compute.
    """
    able = _whole_context(layers, attention)
    if not able:
        raise ModelError(
            f"{name_of(model)} has no layer that attends to the whole context and keeps keys and values alone, only "
            f"such layers are served: its cache has {_kinds(layers, attention)}"
        )
    sparse = [i for i in able if i not in dense]
    for i in sparse:
        if i not in attention:
            raise ModelError(f"layer {i} of {name_of(model)} has no attention that can be routed: make it dense")
        if (beyond := attention[i].beyond) is not None:
            raise ModelError(
                f"layer {i} of {name_of(model)} {beyond}, which sparse attention does not compute: name such layers in "
                f"dense_layers, or use another model"
            )
    return sparse


def check_mapping(name: str, given: Any, sparse: Sequence[int]) -> None:
    """Refuse, by ValueError, a mapping that names other layers than the sparse ones or lacks one of them."""
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
    """Return what `given`, one value or a mapping by layer, says of a layer."""
    return given.get(index, given.get("default")) if isinstance(given, Mapping) else given


def check_budget(index: int, budget: Budget, share: Share) -> None:
    """Refuse, by ValueError, a budget that does not fit the selector of a layer's heads."""
    try:
        budget_of(share.selector, share.budget(budget), 1)
    except ValueError as error:
        raise ValueError(f"layer {index}: {error}") from error
