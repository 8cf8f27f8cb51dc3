"""A page selector tried at sizes that all differ, before its first checked step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.core.context import StepContext
from sparseattn.selectors.abilities import LearnsFromQueries, LooksAhead, ReadsKeys, ReadsRoundedKeys, WeighsUnsealed
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.selectors.rows import Rows

MORE_THAN_KEYS = (LearnsFromQueries, ReadsKeys, ReadsRoundedKeys, WeighsUnsealed, LooksAhead)
SIZES = (5, 7, 11, 13, 17, 19)  # for B, G and P, which must differ from each other and from H and D
TRIAL = " (a trial before the first step, with sizes that all differ)"


def check_broadcast(method: PageSelector, query: Tensor) -> None:
    """Let a fresh instance choose a page at sizes B, G and P that all differ: none then passes for another by chance.

    One sequence and as many query heads in a group as KV heads hide a missing dimension: `[B,H,G,1] * [B,H,P]` is then
    of the right shape, with heads mixed up. Methods that take more than keys are not tried.

    Args:
        method: a page selector.
        query: `[B,H,G,D]`.

    Raises:
        ValueError: `scores` fails or returns another shape than `[B,Hs,P]`.
    """
    if any(part.has(ability) for part in method.tree() for ability in MORE_THAN_KEYS):
        return
    _, heads, group, size = query.shape
    batch, members, pages = [number for number in SIZES if number not in (heads, group, size)][:3]
    try:
        method.check_shape(heads, members, size)
    except ValueError:  # its parameters are made for this group
        members = group
    rows = math.lcm(pages * method.page, method.unit)
    keys = torch.arange(batch * heads * rows * size, device=query.device).cos().to(query.dtype)
    keys = keys.view(batch, heads, rows, size)
    places = torch.arange(rows, device=query.device).expand(batch, -1)
    fresh = method.for_layer(method.layer_context)
    fresh.append(Rows(keys, keys, places))
    probe = keys[:, :, :members].contiguous()
    try:
        fresh.select(probe, StepContext(places[:, -1], places >= 0), method.page)
    except (RuntimeError, IndexError) as error:
        raise ValueError(_failed(fresh, probe, rows, error)) from error
    except ValueError as error:
        raise ValueError(f"{error}{TRIAL}") from error


def _failed(method: PageSelector, query: Tensor, rows: int, error: Exception) -> str:
    entry_shapes = {name: list(getattr(method, name).visible.shape) for name in method.entry_names}
    shapes = ", ".join(f"{name} {shape}" for name, shape in entry_shapes.items())
    return (
        f"scores of {type(method).__name__} fails for {len(query)} sequences, query [B,H,G,D] = {list(query.shape)}, "
        f"{shapes} and real [B,E] = [{len(query)}, {rows // method.unit}]: {error}. Against [B,H,G,P], an entry's "
        f"[B,H,P] is written [:, :, None], and real is written real[:, None, None]{TRIAL}"
    )
