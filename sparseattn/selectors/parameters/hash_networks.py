"""The networks that make HashAttention's codes: three layers each, of keys and of queries.

Letters: H KV heads, G query heads per KV head, D head size, W hidden width, b bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

HIDDEN = 128  # W, as in the paper's code
# Matrix and bias of each layer: of keys [H,D,W], [H,W], [H,W,W], [H,W], [H,W,b], [H,b], of queries [H,G,..].
KEYS = ("keys1", "keys1_bias", "keys2", "keys2_bias", "keys3", "keys3_bias")
QUERIES = ("queries1", "queries1_bias", "queries2", "queries2_bias", "queries3", "queries3_bias")


def through(x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return what a network makes of `x` `[..,n,D]`: `[..,n,b]`; its parts are matrices `[..,i,o]` and biases."""
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    for number, (matrix, bias) in enumerate(pairs):
        x = x @ matrix + bias[..., None, :]
        if number < len(pairs) - 1:
            x = torch.nn.functional.silu(x)
    return x


def first_network(
    names: Sequence[str], lead: tuple[int, ...], size: int, bits: int, draws: torch.Generator
) -> dict[str, Tensor]:
    """Return random parts of a network by name, each with the leading sizes `lead`; products keep their size."""
    tensors: dict[str, Tensor] = {}
    sizes = (size, HIDDEN, HIDDEN, bits)
    for number, (taken, given) in enumerate(itertools.pairwise(sizes)):
        tensors[names[2 * number]] = torch.randn(*lead, taken, given, generator=draws) / taken**0.5
        tensors[names[2 * number + 1]] = torch.zeros(*lead, given)
    return tensors
