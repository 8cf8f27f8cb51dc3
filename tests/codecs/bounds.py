"""How far rows read back may be from those given: each codec's rule in a form of its own, in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from sparseattn.codecs.base import NewRows
from sparseattn.codecs.stored import StoredCodes

SLACK = 1.05  # levels and factors are of 16 bits


def half_steps(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """KIVI: half a step of each channel in a group of keys, and of 32 channels of a value."""
    last = 2**codec.bits - 1
    keys = rows.keys.double().unflatten(2, (-1, codec.group))
    step = (keys.amax(3) - keys.amin(3) + keys.abs().amax(3) / 100) / last
    values = rows.values.double().unflatten(3, (-1, 32))
    of_values = (values.amax(4) - values.amin(4) + values.abs().amax(4) / 100) / last
    of_keys = step.square().sum(-1).repeat_interleave(codec.group, 2) / 4
    return of_keys * SLACK, 32 * of_values.square().sum(-1) / 4 * SLACK


def turned_half_steps(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """RotateKV: in the turned row, which is as long, half a step, or what is clipped off where that is more."""
    size = rows.keys.shape[3]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    found = []
    for part in (rows.unroped if codec.rope else rows.keys, rows.values):
        turned = part.double() @ matrix / size**0.5
        low, high = codec.clip * turned.amin(3, keepdim=True), codec.clip * turned.amax(3, keepdim=True)
        step = (high - low + turned.abs().amax(3, keepdim=True) / 100) / (2**codec.bits - 1)
        off = torch.maximum(torch.maximum(turned - high, low - turned), torch.zeros(())) + step / 2
        found.append(off.square().sum(-1) * SLACK)
    return found[0], found[1]


def nearest_level(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """KVQuant: of each number that does not lie apart, the distance to the nearest of all levels; with Q-Norm what that
    level is read as, which may be farther."""
    found = []
    for name, part in (("key", rows.unroped if codec.rope else rows.keys), ("value", rows.values)):
        levels = kept.part(f"{name}_levels").double()[:, :, 0]  # [B,H,2,K]
        span = kept.part(f"{name}_range").double()
        span = span[:, :, 0][:, :, None] if name == "key" else span[..., None]  # [B,H,1 or n,2,D or 1]
        middle, reach = span.unbind(3)
        units = (part.double() - middle) / reach
        choice = (units[..., None] - levels[:, :, None, None, 0]).abs().argmin(-1)
        read = levels[:, :, 1].gather(2, choice.flatten(2)).view_as(units)
        off = ((read - units) * reach).square()
        apart = kept.part(f"{name}_at").long()
        exact = part.double().gather(3, apart).abs() / 128
        found.append(off.scatter(3, apart, exact.square()).sum(-1) * SLACK + 1e-6)
    return found[0], found[1]


def no_worse_than_rounded(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """GEAR: half steps of what is left without outliers, for the whole seal: low rank takes from it, row by row it may
    shift."""
    last, out = 2**codec.bits - 1, codec.outliers
    keys = rows.keys.double().unflatten(2, (-1, codec.group)).sort(3).values
    inner, mean = keys[:, :, :, out : codec.group - out], keys.mean(3)
    reach = torch.maximum(inner.amax(3), mean) - torch.minimum(inner.amin(3), mean)
    step = (reach + inner.abs().amax(3) / 100) / last
    of_keys = (step.square().sum((2, 3)) * codec.group / 4)[:, :, None]
    values = rows.values.double().sort(3).values
    ends = values[..., [out, -1 - out]]
    of_values = ((ends[..., 1] - ends[..., 0]).clamp(min=0) + values.abs().amax(3) / 100) / last
    of_values = (of_values.square().sum(2) * values.shape[3] / 4)[:, :, None]
    exact = sum(part.double().square().sum((2, 3))[:, :, None] / 2**14 for part in (rows.keys, rows.values))
    count = rows.keys.shape[2]
    return (of_keys * SLACK + exact).expand(-1, -1, count), (of_values * SLACK + exact).expand(-1, -1, count)


def dropped_channels(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """ThinK: the channels with the smallest products of mean squares are lost, the others are there in 16 bits."""
    queries = rows.queries
    assert queries is not None
    score = queries.double().square().mean((2, 3)) * rows.keys.double().square().mean(2)
    lost = score.argsort(-1)[..., : int(codec.ratio * rows.keys.shape[3])]
    keys = rows.keys.double().gather(3, lost[:, :, None].expand(-1, -1, rows.keys.shape[2], -1))
    exact = (rows.keys.double().square().sum(-1), rows.values.double().square().sum(-1))
    return keys.square().sum(-1) + exact[0] / 2**15, exact[1] / 2**15


def outside_the_span(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """ShadowKV's keys: what the leading singular vectors leave of each row, by a decomposition of the keys."""
    keys = (rows.unroped if codec.rope else rows.keys).double()
    leading = torch.linalg.svd(keys, full_matrices=False).Vh[..., : codec.rank, :]  # [B,H,r,D]
    left = keys - keys @ leading.mT @ leading
    exact = keys.square().sum(-1) / 2**11
    return left.square().sum(-1) * SLACK + exact, rows.values.double().square().sum(-1) / 2**15


def last_places(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """Block floating point: the last place of a block's largest number, half of it but for that number itself."""
    order = rows.keys.double().square().sum(2).argsort(2, descending=True)
    keys = rows.keys.double().gather(3, order[:, :, None].expand_as(rows.keys))
    found = []
    for part in (keys, rows.values.double()):
        blocks = part.unflatten(3, (-1, codec.block))
        place = 2.0 ** (blocks.abs().amax(4).log2().floor() + 2 - codec.bits)
        off = torch.where(
            blocks > place[..., None] * (2 ** (codec.bits - 1) - 1), place[..., None], place[..., None] / 2
        )
        found.append(off.square().sum((3, 4)) * SLACK)
    return found[0], found[1]


def nearest_words(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """IVFADC: what the nearest of all centroids leaves, and of that the distance to the nearest word of each part."""
    found = []
    for side, part in (("key", rows.unroped if codec.rope else rows.keys), ("value", rows.values)):
        whole = part.double()
        centroids = kept.part(f"{side}_centroids").double()[:, :, 0, 0]  # [B,H,K,D]
        which = torch.cdist(whole, centroids).argmin(-1, keepdim=True)
        left = whole - centroids.gather(2, which.expand_as(whole))
        words = kept.part(f"{side}_books").double()[:, :, 0]  # [B,H,S,K,d]
        cut = left.unflatten(3, (-1, codec.channels)).transpose(2, 3)  # [B,H,S,n,d]
        near = torch.cdist(cut, words).amin(-1).square().sum(2)
        found.append(near * SLACK + whole.square().sum(-1) / 2**14)
    return found[0], found[1]


def half_steps_of_two_classes(codec: Any, rows: NewRows, kept: StoredCodes) -> tuple[Tensor, Tensor]:
    """ZipCache: half a step of a channel among the rows of its class, and of a value in units of its channels' roots;
    the class is decided by the attention received, over how many tokens see the row."""
    assert rows.weights is not None
    assert rows.seen is not None
    score = rows.weights.double() / (rows.seen if codec.score == "normalised" else 1)
    count = math.ceil(score.shape[2] * codec.share)
    salient = torch.zeros_like(rows.real).scatter(2, score.topk(count, 2).indices, True)
    root = rows.values.double().abs().amax(2, keepdim=True).sqrt()
    divided = rows.values.double() / root
    reach = divided.amax(3, keepdim=True) - divided.amin(3, keepdim=True) + divided.abs().amax(3, keepdim=True) / 100
    of_keys, of_values = torch.zeros_like(score), torch.zeros_like(score)
    for bits, mine in ((codec.high, salient), (codec.low, ~salient)):
        for b, h in itertools.product(*map(range, mine.shape[:2])):
            keys = rows.keys[b, h][mine[b, h]].double()
            step = (keys.amax(0) - keys.amin(0) + keys.abs().amax(0) / 100) / (2**bits - 1)
            of_keys[b, h][mine[b, h]] = step.square().sum() / 4 * SLACK
        off = (reach / (2**bits - 1) * root / 2).square().sum(3) * SLACK
        of_values = torch.where(mine, off, of_values)
    return of_keys, of_values + rows.values.double().square().sum(3) / 2**14
