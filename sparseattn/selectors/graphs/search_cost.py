"""What is expected of searches whose work the data decide: keys that a walk through a graph scores, and overlaps."""

from __future__ import annotations

import math

from torch import Tensor

from sparseattn.core.step_cost import ChoiceCost, Launch, Scan

# Of the links that a walk through a graph looks at, those that lead to keys not among the many that it knows by then:
# RetrievalAttention scores so many on 8,000 to 32,000 keys of SmolLM2 and Gemma.
NEW = 0.4


def new_of(keys: float, drawn: float) -> float:
    """Return how many different ones of so many `keys` are expected to be among as many `drawn` at random."""
    return keys * -math.expm1(-drawn / keys)


def walk_scan(query: Tensor, sealed: int, rows: int, beam: int, degree: int, width: int) -> Scan:
    """Return what a search for each query head reads that walks a graph: as if it expanded as many keys as its beam
    holds.

    Args:
        query: `[B,H,G,D]`.
        sealed: keys of the graph.
        rows: read of what is found.
        beam: keys kept during the search, `rows` at least.
        degree: links of a key, of 4 bytes.
        width: bytes of a number of a key.
    """
    group, size = query.shape[2:]
    expanded = min(max(beam, rows), sealed)
    scored = new_of(sealed, NEW * expanded * degree)
    return Scan(scored, group * (scored * size * width + expanded * degree * 4))


def walk_cost(query: Tensor, scan: Scan, rows: int, operators: int) -> ChoiceCost:
    """Return the cost of such a search.

    Args:
        query, rows: as of `walk_scan`.
        scan: what it returned.
        operators: beside the walk.
    """
    batch, heads, group, _ = query.shape
    walk = Launch("walk", batch * heads * scan.read, entries=batch * heads * group * scan.scanned)
    expected = f"a walk expands as many keys as its beam, and {NEW:.0%} of their links lead to new ones"
    return ChoiceCost((walk, Launch("operator", count=operators)), heads * group, rows, rows, expected=expected)
