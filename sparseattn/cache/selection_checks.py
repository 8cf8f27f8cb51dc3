"""Whether a selection keeps to the contract: checked in every comparison and every test, never in a step that is timed.

A selector that names more rows than its budget, a row twice, or a cost below nothing, would look better than it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.cache.page_trial import check_broadcast
from sparseattn.core.selection import Selection, Tail, Weighed
from sparseattn.selectors.abilities import Biases, Evicts
from sparseattn.selectors.base import Selector
from sparseattn.selectors.pages.base import PageSelector


class ContractError(ValueError):
    """A selector returned what the contract does not allow, in one sentence: selector, step, head and rows."""


def check(
    selection: Selection,
    query: Tensor,
    positions: Tensor,
    budget: int,
    sealed: int,
    real: Tensor | None,
    selector: Selector,
) -> None:
    """Check that the selection names distinct sealed rows, no padding, none that was dropped before, and at most
    `budget` of them for each head, with finite biases, and what it says of its cost are counts of the right shape.

    Makes the host wait for the device.

    Args:
        selection, query, positions, budget: what `select` returned, and was given: `[B,H,G,D]`, `[B]` and rows.
        sealed: rows that the selector has been shown, padding included.
        real: `[B,H,sealed]` bool, which of them are neither padding nor dropped (`Selector.held`); None: all.
        selector: who it was, for the sentence.

    Raises:
        ContractError: the first violation found.
    """
    if not isinstance(selection, Selection):
        raise ContractError(f"{selector!r} returned {type(selection).__name__} from select, not a Selection")
    batch, heads, group, _ = query.shape
    shape = tuple(selection.start.shape[:2])
    if shape not in ((batch, heads), (batch, heads * group)):
        raise ContractError(
            f"{selector!r} returned a selection [B,Hs,S] = {list(selection.start.shape)} for a query "
            f"{list(query.shape)}: B is {batch} and Hs is {heads} (per KV head) or {heads * group} (per query head)"
        )
    if selection.bias is not None and not selector.find(Biases):
        raise ContractError(
            f"{selector!r} returned a selection with a bias and is no Biases: a class whose selections have one names "
            f"that ability in its bases, so that whoever takes its rows knows"
        )
    costs = {"scanned": (selection.scanned, shape), "scan_bytes": (selection.scan_bytes, (batch, heads))}
    for name, (cost, wanted) in costs.items():
        if cost is None:
            continue
        if tuple(cost.shape) != wanted or cost.dtype != torch.int64:
            letters = "[B,Hs]" if name == "scanned" else "[B,H]"
            raise ContractError(
                f"{selector!r} reports {name} as {cost.dtype} {list(cost.shape)}: it is None or int64 {letters} = "
                f"{list(wanted)}"
            )
        if bool((cost < 0).any()):
            raise ContractError(f"{selector!r} reports {name} of {int(cost.min())}: counts are 0 or more")
    _check_rows(selection, query, positions, budget, sealed, real, selector)


def check_pages(query: Tensor, selector: Selector) -> None:
    """Methods that score pages do so in the right shape for any batch, group and number of pages (`check_broadcast`).

    Arguments as of `check`.

    Raises:
        ContractError: the first violation found.
    """
    for method in selector.find(PageSelector):
        try:
            check_broadcast(method, query)
        except ValueError as error:
            raise ContractError(f"{selector!r}: {error}") from error


def check_weighed(weighed: Weighed, query: Tensor, selector: Selector) -> None:
    """Return what rows are estimated to weigh is of the query's heads: numbers, or -inf as of unused slots.

    Makes the host wait for the device. Arguments as of `check`, which looks at the selection.

    Raises:
        ContractError: the first violation found.
    """
    if not isinstance(weighed, Weighed):
        raise ContractError(f"{selector!r} returned {type(weighed).__name__} from weigh, not a Weighed")
    _, heads, group, _ = query.shape
    if weighed.rest.shape[1] != heads * group:
        raise ContractError(
            f"{selector!r} weighs its selection for {weighed.rest.shape[1]} query heads, and the query has "
            f"{heads * group}"
        )
    for name, part in (("what its rows weigh", weighed.weights), ("what the rest weighs", weighed.rest)):
        if bool((part.isnan() | part.isposinf()).any()):
            raise ContractError(
                f"{selector!r} estimates {name} as NaN or infinite: it is a logarithm, -inf for nothing"
            )
    used = (weighed.selection.length > 0).repeat_interleave(heads * group // weighed.selection.length.shape[1], 1)
    if not bool(weighed.weights[~used].isneginf().all()):
        raise ContractError(f"{selector!r} says that slots which are not used weigh something: they weigh -inf")


def check_tail(tail: Tail | None, query: Tensor, positions: Tensor, selector: Selector) -> None:
    """Check that a tail's rows fit the query, and its selection names distinct rows among them with finite biases.

    Makes the host wait for the device. Arguments as of `check`.

    Raises:
        ContractError: the first violation found.
    """
    if tail is None:
        return
    if not isinstance(tail, Tail):
        raise ContractError(f"{selector!r} returned {type(tail).__name__} from tail, not a Tail or None")
    batch, heads, group, size = query.shape
    rows, chosen = tail.keys.shape[2], tail.selection.start.shape
    for name, part in (("keys", tail.keys), ("values", tail.values)):
        if part.shape != (batch, heads, rows, size) or part.dtype != query.dtype or part.device != query.device:
            raise ContractError(
                f"{selector!r} returned {name} of a tail as {part.dtype} {list(part.shape)} on {part.device}: for a "
                f"query {list(query.shape)} they are {query.dtype} [B,H,M,D] = [{batch}, {heads}, M, {size}] on "
                f"{query.device}"
            )
    if chosen[1] not in (heads, heads * group):
        raise ContractError(
            f"{selector!r} returned a tail with a selection [B,Hs,S] = {list(chosen)} for a query "
            f"{list(query.shape)}: Hs is {heads} (per KV head) or {heads * group} (per query head)"
        )
    _check_rows(
        tail.selection, query, positions, rows, rows, None, selector, ("the rows of its tail", "its tail has none")
    )


def _check_rows(
    selection: Selection,
    query: Tensor,
    positions: Tensor,
    budget: int,
    sealed: int,
    real: Tensor | None,
    selector: Selector,
    whose: tuple[str, str] = ("the rows it was shown", "was shown none"),
) -> None:
    """Do the part of `check` that looks at which rows are named; `whose` says what they are, and that there are
    none."""
    start, length = (part.to("cpu", torch.int64) for part in (selection.start, selection.length))
    kind = "KV head" if start.shape[1] == query.shape[1] else "query head"

    def refuse(wrong: Tensor, what: str) -> None:
        """`wrong` `[B,Hs]` or `[B,Hs,S]`: raises for the first head, and slot, where it is true."""
        if not bool(wrong.any()):
            return
        b, head, *slot = wrong.nonzero()[0].tolist()
        first, rows = (int(part[b, head, slot[0]]) if slot else 0 for part in (start, length))
        named = f"rows {first} to {first + rows - 1}" if rows > 1 else f"row {first}"
        facts = {"rows": named, "first": first, "length": rows, "total": int(length[b, head].sum())}
        at = f"layer {selector.layer}, position {int(positions[b])}, sequence {b}, {kind} {head}"
        raise ContractError(f"{selector!r} broke the contract ({at}): {what.format(**facts)}")

    refuse(
        (length < 0) | (length > selection.span),
        f"a span of {{length}} rows from row {{first}} on, where a span has 0 to {selection.span}",
    )
    used = length > 0
    if selection.whole:
        refuse(
            used & ((length != selection.span) | (start % selection.span != 0)),
            f"it names {{rows}} and calls that a whole page, where a page has {selection.span} rows from a multiple of "
            f"{selection.span} on",
        )
    refuse(
        used & ((start < 0) | (start + length > sealed)),
        "it names {rows}, and " + (f"{whose[0]} are 0 to {sealed - 1}" if sealed else whose[1]),
    )
    twice = _overlapping(torch.where(used, start, sealed), length)  # unused slots overlap with nothing at the end
    refuse(twice, "it names {rows} of which another span holds some as well: a row is read once")
    if selection.bias is not None:
        wrong = used & ~selection.bias.cpu().isfinite()
        refuse(wrong, "the bias of {rows} is NaN or infinite, and a bias is finite")
    refuse(length.sum(-1) > budget, f"it names {{total}} rows for a budget of {budget}")
    if real is not None and sealed:
        count = _real_rows(start, torch.where(used, length, 0), real)
        more = " or what it had dropped (held)" if selector.find(Evicts) else ""
        refuse(used & (count < length), "it names {rows}, among them padding" + more)


def _overlapping(start: Tensor, length: Tensor) -> Tensor:
    """`[B,Hs,S]` bool: the spans that begin before the span before them in row order has ended."""
    ordered, place = start.sort(dim=-1)
    ends = ordered + length.gather(-1, place)
    return torch.zeros_like(start, dtype=torch.bool).scatter(-1, place[..., 1:], ordered[..., 1:] < ends[..., :-1])


def _real_rows(start: Tensor, length: Tensor, real: Tensor) -> Tensor:
    """`[B,Hs,S]`: how many rows of each span, of a start and a length, are `real` `[B,H,sealed]`."""
    before = torch.nn.functional.pad(real.to("cpu", torch.int64).cumsum(-1), (1, 0))  # [B,H,sealed+1]
    before = before.repeat_interleave(start.shape[1] // real.shape[1], 1)
    first = torch.where(length > 0, start, 0)
    return before.gather(-1, first + length) - before.gather(-1, first)
