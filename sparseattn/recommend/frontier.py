"""What every method at every budget errs and reads in a layer of a model, and how far that moves predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparseattn.cache.all_rows import copy_rows
from sparseattn.cache.kv_cache import KVCache
from sparseattn.cache.shown_rows import unit_of
from sparseattn.core.context import LayerContext
from sparseattn.core.layer_choices import Board
from sparseattn.models.error_sensitivity import LayerSeen
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_heads import SparseHeads
from sparseattn.roles.role import Role, Share


@dataclass(frozen=True)
class RolePoint:
    """What a role does in one layer, in the mean over the tokens of one window.

    Args:
        role: method and budget.
        kl: nats a token by which this layer alone moves the next-token distribution, to second order.
        kl_heads: the same of each KV head alone, `H` numbers.
        error_heads: norm of the output's error over the norm of the output, of each KV head.
        bytes_heads: bytes read to choose and to attend over the bytes of the whole cache, of each KV head.
    """

    role: Role
    kl: float
    kl_heads: list[float]
    error_heads: list[float]
    bytes_heads: list[float]


def measured(
    prefill: Prefill, seen: LayerSeen, layer: int, roles: Sequence[Role], *, sink: int, window: int, depth: int
) -> list[RolePoint]:
    """One method at several budgets in one layer: the tokens seen are decoded over the prompt's rows.

    Args:
        prefill: the prompt.
        seen: what full attention did at the tokens behind it.
        layer: its number.
        roles: of one method.
        sink, window: as in `KVCache`.
        depth: layers of the model.
    """
    shape = seen.shape
    share = Share(roles[0].selector, None, roles[0])
    selector = share.fresh(LayerContext(layer, depth, rope=shape.rope, scale=shape.scale, board=Board()))
    heads = SparseHeads(share, KVCache(selector, sink=sink, window=window, seal=unit_of(selector), check=True), None)
    copy_rows(prefill.rows(layer), heads.rows)
    heads.rows.seal()
    return [_point(heads, seen, role) for role in roles]


def _point(heads: SparseHeads, seen: LayerSeen, role: Role) -> RolePoint:
    twin = heads.clone()
    twin.assign(Share(heads.share.selector, None, role), None)
    outs = []
    for t in range(seen.query.shape[3]):
        at, query = slice(t, t + 1), seen.query[:, :, :, t]
        twin.append(seen.keys[:, :, at], seen.values[:, :, at], seen.query[:, :, :, at], None)
        outs.append(twin.decode(query, seen.shape.scale, None))
    out, full = torch.stack(outs, 3).float()[0], seen.out.float()[0]  # [H,G,n,D]
    error = out - full
    moved = (seen.gradients * error).sum((2, 4))  # [S,H,n]
    return RolePoint(
        role,
        0.5 * float(moved.sum(1).square().mean()),
        (0.5 * moved.square().mean((0, 2))).tolist(),
        (error.norm(dim=(1, 3)) / full.norm(dim=(1, 3)).clamp(min=1e-30)).mean(1).tolist(),
        twin.bytes_by_head().tolist(),
    )
