"""What is expected of searches whose work the data decide: keys that a walk through a graph scores, and overlaps."""

from __future__ import annotations

import math

from torch import Tensor

from sparseattn.core.step_cost import Launch, Scan

# Of the links that a walk through a graph looks at, those that lead to keys not among the many that it knows by then:
# RetrievalAttention scores so many on 8,000 to 32,000 keys of SmolLM2 and Gemma.
NEW = 0.4


def new_of(keys: float, drawn: float) -> float:
    """Return how many different ones of so many `keys` are expected to be among as many `drawn` at random."""
    return keys * -math.expm1(-drawn / keys)


def walk_scan(query: Tensor, sealed: int, rows: int, *, beam: int, degree: int, width: int, operators: int) -> Scan:
    """Return what a search of a graph reads, for each query head: as if it expanded as many keys as its beam holds.

    Args:
        query: `[B,H,G,D]`.
        sealed: keys of the graph.
        rows: read of what is found.
        beam: keys kept during the search, `rows` at least.
        degree: links of a key, of 4 bytes.
        width: bytes of a number of a key.
        operators: tensor operations beside the walk.
    """
    batch, heads, group, size = query.shape
    expanded = min(max(beam, rows), sealed)
    scored = new_of(sealed, NEW * expanded * degree)
    read = group * (scored * size * width + expanded * degree * 4)
    walk = Launch("walk", batch * heads * read, entries=batch * heads * group * scored)
    expected = f"a search expands as many keys as its beam is wide, and {NEW:.0%} of their links lead to new keys"
    launches = walk, Launch("operator", count=operators)
    return Scan(scored, read, launches, heads * group, rows, rows, expected=expected)
