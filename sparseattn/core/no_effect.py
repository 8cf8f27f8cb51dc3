"""Settings that change nothing at the lengths asked for: each a sentence with the number that would change something.

A run with such a setting gives full attention's figures under a method's name. "all" as a budget says so itself, and is
no mistake.
"""

from __future__ import annotations

from sparseattn.core.budget import Budget, Mass, parse_budget


class NoEffect(ValueError):
    """A setting that changes nothing."""


def idle_budget(budget: Budget, longest: int, sink: int, window: int, what: str = "the longest sequence") -> str | None:
    """Return why a method reads every row of sequences of up to `longest` rows; None where it leaves some out.

    Args:
        budget: rows beyond sink and window. A share below 100 % always has an effect, and "all" is meant.
        longest: rows of the longest sequence, the query's own among them.
        sink, window: first and last rows that every query reads.
        what: the longest sequence is called so.
    """
    budget = parse_budget(budget)
    rows = budget.most if isinstance(budget, Mass) else budget
    if rows is None and not isinstance(budget, Mass):
        return None
    choice = longest - sink - window
    if choice <= 0:
        return (
            f"--sink {sink} and --window {window} read all {longest:,} rows of {what}, so that no method chooses: "
            f"let both together be less than {longest:,}"
        )
    if isinstance(rows, int) and rows >= choice:
        return (
            f"--budget {rows} has no effect: {what} has {longest:,} rows, of which --sink {sink} and --window {window} "
            f"leave {choice:,} to choose from; a budget below {choice:,} leaves some out"
        )
    return None


def idle_above(above: int, longest: int, what: str = "the longest sequence") -> str | None:
    """Return why no sequence of up to `longest` rows is decoded sparsely; None where one is."""
    if above < longest:
        return None
    return (
        f"--above {above} keeps every sequence dense: {what} has {longest:,} rows; a number below {longest:,} lets "
        f"some be sparse"
    )


def idle_layers(dense: int, most: int) -> str | None:
    """Return why no layer is sparse where the first `dense` stay dense; `most` of them leave one sparse."""
    if dense <= most:
        return None
    return f"--dense-layers {dense} leaves no layer of the whole context sparse: at most {most} may stay dense"


def refuse(*sentences: str | None) -> None:
    """Raise NoEffect with the first sentence that there is."""
    for sentence in sentences:
        if sentence is not None:
            raise NoEffect(sentence)
