"""What a request of a server asks of its own decoding, and what it read: by vLLM's `extra_args` and a file.

A client says `{"sparseattn": {"budget": 512}}` or `{"sparseattn": {"dense": true}}` in a request's body. The server's
middleware (`middleware.py`) checks it and passes it on as `vllm_xargs`, which vLLM hands to the worker with the
sampling parameters. It adds a ticket, by which it later finds what the worker counted for the request.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseattn.serving.vllm import counters
from sparseattn.utils.json_fields import Flag, Number, Object

KEY = "sparseattn"  # of a request's body, and of what its usage says
BUDGET, DENSE, TICKET = "sparseattn_budget", "sparseattn_dense", "sparseattn_ticket"  # names in `vllm_xargs`
ASKS = (BUDGET, DENSE)
OWN = -1  # a budget: the server's
_FIELDS = Object(more={"budget": Number(1, whole=True), "dense": Flag()}, closed=True)
MOST = 1 << 40  # rows, more than any context has: a larger budget is this one
SLOTS = 1 << 14  # requests whose counts a file holds; a later one with the same place takes it
SLOT = struct.Struct("=4q")  # ticket, tokens, rows read, rows held


@dataclass(frozen=True, eq=False)
class RequestChoices:
    """What the requests of a step ask.

    Args:
        budgets: `[R]` int64, rows; `OWN` where the server's holds.
        dense: `[R]` bool, which are to be decoded densely.
        tickets: `[R]` int64; 0 for none.
    """

    budgets: Any
    dense: Any
    tickets: Any


def asked_by(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `vllm_xargs` ask by their own names, as a body's field would; {} where they ask nothing."""
    asked = {"budget": arguments[BUDGET]} if BUDGET in arguments else {}
    return {**asked, "dense": True} if arguments.get(DENSE) == 1 else asked


def checked(
    given: Any, page: int, allowed: bool, budgeted: bool = True, most: int | None = None, device: str = "cpu"
) -> dict[str, int]:
    """Return what a request's body asks, as `vllm_xargs`.

    Args:
        given: the body's field.
        page: the least budget.
        allowed: whether requests may ask anything.
        budgeted: whether a method of the server depends on a budget.
        most: the largest budget, with which no request is dense; None: any, and requests may be dense.
        device: that the engine runs on.

    Raises:
        ValueError: it asks something else, too little, too much, or may ask nothing.
    """
    if device != "cpu":
        raise ValueError(
            f'"{KEY}": requests choose on CPUs alone, and this server runs on {device} with one budget for all, that '
            f"of its start (--budget): leave it out"
        )
    _FIELDS.check(given, f'"{KEY}"')
    if not allowed:
        raise ValueError(f'this server was started with --no-per-request: leave "{KEY}" out')
    if "budget" in given and given.get("dense"):
        raise ValueError(f'"{KEY}": a dense request reads every row: give budget or dense')
    if "budget" in given and not budgeted:
        raise ValueError(f'"{KEY}": this server\'s method reads the same rows at every budget: leave budget out')
    if given.get("budget", page) < page:
        raise ValueError(f'"{KEY}": budget is {page} rows or more here, got {given["budget"]}')
    if most is not None and given.get("dense"):
        raise ValueError(
            f'"{KEY}": this server lets a request ask for a budget of {most} rows at most (--max-budget), and a dense '
            f"one reads every row: give a budget, or leave it out"
        )
    if most is not None and given.get("budget", most) > most:
        raise ValueError(f'"{KEY}": budget is {most} rows or less here (--max-budget), got {given["budget"]}')
    if given.get("dense"):
        return {DENSE: 1}
    return {BUDGET: given["budget"]} if "budget" in given else {}


def request_choices(
    arguments: Sequence[Mapping[str, Any] | None], page: int, allowed: bool, most: int | None = None
) -> RequestChoices | None:
    """Return what requests ask by their `extra_args`; None where none asks anything.

    What is no whole number, below a page or beyond `most` is not followed: the middleware has refused it where there is
    one. With `most` no request is dense either.
    """
    if not any(arguments):
        return None
    budgets, dense, tickets = [], [], []
    for given in arguments:
        own = given or {}
        budget = own.get(BUDGET, OWN) if allowed else OWN
        fits = type(budget) is int and budget >= page and (most is None or budget <= most)
        budgets.append(min(budget, MOST) if fits else OWN)
        dense.append(allowed and most is None and own.get(DENSE) == 1)
        ticket = own.get(TICKET, 0)
        tickets.append(ticket if type(ticket) is int and 0 <= ticket < 1 << 62 else 0)
    return RequestChoices(np.array(budgets, np.int64), np.array(dense, np.bool_), np.array(tickets, np.int64))


class RequestCounts:
    """This process's counts by request."""

    def __init__(self) -> None:
        held = counters.mapped("requests", SLOTS * SLOT.size)
        self._held: Any = np.frombuffer(held, np.int64).reshape(SLOTS, 4)

    def add(self, ticket: int, tokens: int, read: int, stored: int) -> None:
        """Add what a step of a request read, over all layers."""
        own = self._held[ticket % SLOTS]
        if own[0] != ticket:
            own[:] = ticket, 0, 0, 0
        own[1:] += tokens, read, stored


def of_process() -> RequestCounts:
    """Return the counts of this process."""
    global _own
    if _own is None or _own[0] != os.getpid():
        _own = os.getpid(), RequestCounts()
    return _own[1]


_own: tuple[int, RequestCounts] | None = None


def said(ticket: int) -> dict[str, int]:
    """Return what the request of a ticket read so far, in any process of the engine.

    Processes that share layers (tensor parallelism) count the same, each for its heads: one of them says it.
    """
    counts = (0, 0, 0)
    for path in Path(os.environ.get(counters.FOLDER, os.devnull)).glob("*.requests"):
        with path.open("rb") as file:
            file.seek(ticket % SLOTS * SLOT.size)
            numbers = file.read(SLOT.size)
        if len(numbers) == SLOT.size and (own := SLOT.unpack(numbers))[0] == ticket:
            counts = max(counts, own[1:])
    return dict(zip(("sparse_tokens", "rows_read", "rows_held"), counts, strict=True))
