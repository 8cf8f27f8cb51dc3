"""What constructors of methods check and share."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.kernels.group_vote.dispatch import GROUPS

MOST = 1 << 16  # entries of a list that is kept for every query, guide or key: 8 bytes each


def half(keys: Tensor) -> torch.dtype:
    """Return what levels and centroids of keys are kept in: the keys' dtype if it has 16 bits, else bfloat16."""
    return keys.dtype if keys.element_size() == 2 else torch.bfloat16


def into_range(numbers: Tensor, kind: torch.dtype) -> Tensor:
    """Return `[H]`, the powers of two, 1 or less, that bring `numbers` `[H,...]` float32 into the range of `kind`."""
    most = numbers.abs().flatten(1).amax(1) / torch.finfo(kind).max
    return 2.0 ** -most.log2().ceil().clamp(min=0)


def check_least(**sizes: tuple[int, int]) -> None:
    """Refuse an argument, given with its least value, that is below it: ValueError."""
    for name, (size, least) in sizes.items():
        if size < least:
            raise ValueError(f"{name} is {least} or more, got {size}")


def check_most(**sizes: int) -> None:
    """Refuse an argument above what a list, or a beam, of one query or key has any use for: ValueError."""
    for name, size in sizes.items():
        if size > MOST:
            raise ValueError(f"{name} is {MOST:,} or less (a list of so many is half a MiB), got {size:,}")


def check_query_heads(query: Tensor, shown: int) -> None:
    """Refuse a query `[B,H,G,D]` where what a method keeps is of `shown` query heads per KV head, not G: ValueError."""
    if query.shape[2] != shown:
        raise other_heads(shown, query.shape[2])


def other_heads(shown: int, got: int) -> ValueError:
    """Return the refusal of a query of another number of query heads per KV head."""
    return ValueError(f"this cache was shown queries of {shown} query heads per KV head, got a query of {got}")


def check_share(share: float) -> None:
    """Refuse a share of the queries outside [0, 1]: ValueError."""
    if not 0 <= share <= 1:
        raise ValueError(f"share is the share of the queries used, 0 to 1, got {share}")


def known_rope(method: object, context: LayerContext, does: str, instead: str) -> Rope:
    """Return the fixed RoPE of a method's layer, for which it `does` something that needs it.

    Raises:
        ValueError: it is not known; the sentence says what to take `instead`.
    """
    if context.rope is None:
        raise ValueError(
            f"{method} {does}, and no fixed RoPE of layer {context.layer} is known here: give for_layer a LayerContext "
            f"with it, or {instead}"
        )
    return context.rope


def check_group(group: str) -> str:
    """Return `group` if it names a way for a query group to choose, else ValueError."""
    if group not in GROUPS:
        raise ValueError(f"group is one of {', '.join(GROUPS)}, got {group!r}")
    return group


def warn_of_keys_as_queries(method: object, heads: int, total: int) -> None:
    """Warn that in `heads` of `total` heads no query was there to learn from."""
    warnings.warn(
        f"{method} has no queries of the prefill to learn from in {heads} of {total} heads: the keys serve as "
        f"queries, so it finds less at the same work",
        stacklevel=3,
    )
