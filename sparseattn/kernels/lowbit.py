"""Keys of a few bits: how they are rounded, packed and scored. In torch, which is the specification.

A group of `rows` consecutive rows shares, for each channel, a lowest level and a step (as KIVI stores keys,
https://arxiv.org/abs/2402.02750); a row keeps a code of 1, 2 or 4 bits a channel, and its key is read as
`low + step * code`. Groups by channel and not by row, because keys have channels far larger than others.

Codes are packed into bytes: byte j of a row's `4 W` holds channels j, j + 4W, j + 8W, .., lowest bits first, the head
size padded to a multiple of `32 / bits`. A group's are stored as `(rows/T, W, T, 4)`, flat: words of 4 bytes, those of T
rows beside each other. T is `TILE` in host memory, where a vector register takes one word of as many rows, and 1 on a
GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import scoring

IMPLS = ("torch", "triton")
TILE = 16  # rows of which a register of 64 bytes takes a word each
CHUNK = 1 << 22  # numbers of unpacked keys at a time


def words(size: int, bits: int) -> int:
    """W: words of 4 bytes that the codes of a row of `size` channels take."""
    return -(-size * bits // 32)


def tile(device: torch.device) -> int:
    """T: rows whose words lie beside each other in the memory of a device."""
    return TILE if device.type == "cpu" else 1


def nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `numbers` as the nearest finite ones of a 16-bit `dtype`."""
    most = torch.finfo(dtype).max
    return numbers.clamp(-most, most).to(dtype)


def rounded(numbers: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    """float32 `numbers` as the nearest of a 16-bit `dtype` that is not below (`up`) or not above them; finite."""
    near, most = nearest(numbers, dtype), torch.finfo(dtype).max
    wrong = near.float() < numbers if up else near.float() > numbers
    bits = near.view(torch.int16)
    away = (bits >= 0) == up  # from zero: the next number has the next bits
    moved = torch.where(away, bits + 1, bits - 1)
    smallest = torch.tensor(1 if up else -(1 << 15) + 1, dtype=torch.int16, device=bits.device)
    moved = torch.where(near == 0, smallest, moved)
    return torch.where(wrong, moved, bits).view(dtype).clamp(-most, most)


def quantise(keys: Tensor, rows: int, bits: int, levels: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and levels of keys.

    Args:
        keys: `[B,H,n,D]`, n a multiple of `rows`.
        rows: of a group.
        bits: 1, 2 or 4 a channel.
        levels: "bins": in the middle of equal parts of the distance from the least to the largest number of a channel
            in the group, so that none is farther than half a step from its level. "ends": the least, the largest and
            equal steps between them, as KIVI and FIER have it. "means", for one bit: the means of the numbers below and
            above the middle of that distance, which keep a few large numbers apart from the many small ones.
        dtype: of the levels, 16 bits; steps are rounded up.

    Returns:
        codes `[B,H,n,D]` uint8; low, the level of code 0, and step `[B,H,n/rows,D]`.
    """
    grouped = keys.float().unflatten(2, (-1, rows))  # [B,H,n/rows,rows,D]
    least, most = grouped.amin(3), grouped.amax(3)
    last = (1 << bits) - 1
    if levels == "ends":
        low = rounded(least, dtype, up=False)
        step = rounded((most - low.float()) / last, dtype, up=True)
    elif levels == "bins":
        low = nearest(least + (most - least) / (2 << bits), dtype)
        needed = torch.maximum((low.float() - least) * 2, (most - low.float()) / (last + 0.5))
        step = rounded(needed, dtype, up=True)
    else:
        upper = grouped > ((least + most) / 2)[:, :, :, None]
        above = upper.sum(3)
        total, high = grouped.sum(3), torch.where(upper, grouped, 0.0).sum(3)
        low = nearest((total - high) / (rows - above), dtype)  # the least number is never above the middle
        step = nearest((high / above.clamp(min=1) - low.float()) * (above > 0), dtype)
    held = step.float()[:, :, :, None]
    codes = (grouped - low.float()[:, :, :, None]) / torch.where(held > 0, held, 1.0)
    return codes.round_().clamp_(0, last).to(torch.uint8).flatten(2, 3), low, step


def pack(codes: Tensor, rows: int, bits: int) -> Tensor:
    """`[B,H,n/rows,rows*4W]` uint8 of codes `[B,H,n,D]`."""
    wide, planes = words(codes.shape[-1], bits), 8 // bits
    codes = torch.nn.functional.pad(codes, (0, 4 * wide * planes - codes.shape[-1])).unflatten(-1, (planes, 4 * wide))
    packed = codes[..., 0, :].clone()
    for plane in range(1, planes):
        packed |= codes[..., plane, :] << (bits * plane)
    packed = packed.unflatten(2, (-1, rows)).unflatten(4, (wide, 4))  # [B,H,n/rows,rows,W,4]
    return packed.unflatten(3, (-1, tile(codes.device))).transpose(4, 5).flatten(3).contiguous()


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Codes `[B,H,n,D]` uint8 of `pack`'s `[B,H,n/rows,rows*4W]`, D = `size`."""
    shape = -1, words(size, bits), tile(packed.device), 4
    return planes(packed.unflatten(3, shape).transpose(4, 5).flatten(5).flatten(2, 4), bits, size)


def planes(rows: Tensor, bits: int, size: int) -> Tensor:
    """Codes `[..,D]` uint8 of rows' bytes `[..,4W]`, D = `size`."""
    mask = (1 << bits) - 1
    return torch.cat([(rows >> (bits * plane)) & mask for plane in range(8 // bits)], -1)[..., :size]


def moved(packed: Tensor, bits: int, size: int, device: torch.device) -> Tensor:
    """Packed codes on a device, ordered as they are stored there."""
    shape = -1, words(size, bits), tile(packed.device), 4
    rows = packed.unflatten(3, shape).transpose(4, 5).flatten(3, 4).to(device)  # [B,H,n/rows,rows,W,4]
    return rows.unflatten(3, (-1, tile(rows.device))).transpose(4, 5).flatten(3).contiguous()


def keys_of(packed: Tensor, low: Tensor, step: Tensor, bits: int) -> Tensor:
    """`[B,H,n,D]` float32: the keys that codes and levels stand for."""
    codes = unpack(packed, bits, low.shape[-1])
    codes = codes.unflatten(2, (low.shape[2], -1)).float()  # [B,H,n/rows,rows,D]
    return (codes * step.float()[:, :, :, None] + low.float()[:, :, :, None]).flatten(2, 3)


def logits(
    query: Tensor, packed: Tensor, low: Tensor, step: Tensor, real: Tensor, bits: int, impl: str | None = None
) -> Tensor:
    """The logits of rows by their keys of few bits.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        packed: `[B,H,N/rows,rows*4W]` uint8, see the module.
        low, step: `[B,H,N/rows,D]`.
        real: `[B,N]` bool.
        bits: of a code.
        impl: see `scoring`.

    Returns:
        `[B,H,G,N]` float32: `q . (low + step * code) / sqrt(D)`, -inf where a row is not real.
    """
    impl = scoring.chosen(impl, query.device, query.dtype, IMPLS)
    if impl == "triton":
        from sparseattn.kernels import lowbit_gpu

        return lowbit_gpu.scores(query, packed, low, step, real, bits, "each").unflatten(1, query.shape[1:3])
    batch, heads, _, size = query.shape
    asked, groups = query.float() / size**0.5, low.shape[2]
    once = max(CHUNK // max(batch * heads * real.shape[1] // max(groups, 1) * size, 1), 1)  # groups
    parts = zip(packed.split(once, 2), low.split(once, 2), step.split(once, 2), strict=True)
    out = torch.cat([asked @ keys_of(*part, bits).mT for part in parts], -1)
    return out.masked_fill(~real[:, None, None], -torch.inf)


def scores(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    real: Tensor,
    bits: int,
    group: str,
    page: int = 1,
    impl: str | None = None,
) -> Tensor:
    """`logits`, the masses of pages of them, and the group's vote.

    Args:
        group: see `scoring.vote`.
        page: rows of a page, which scores the logarithm of the sum of its rows' exponentiated logits; it divides the
            rows of a group. 1: rows score their own logits.

    Returns:
        `[B,Hs,N/page]` float32, -inf where no row is real.
    """
    impl = scoring.chosen(impl, query.device, query.dtype, IMPLS)
    if impl == "triton":
        from sparseattn.kernels import lowbit_gpu

        return lowbit_gpu.scores(query, packed, low, step, real, bits, group, page)
    found = logits(query, packed, low, step, real, bits, impl)
    if page > 1:
        found = found.unflatten(-1, (-1, page)).logsumexp(-1)
    return scoring.vote(found, group, impl)


def listed_logits(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    real: Tensor,
    bits: int,
    pages: Tensor,
    page: int,
    impl: str | None = None,
) -> Tensor:
    """As `logits`, of the rows of listed pages alone.

    Args:
        pages: `[B,Hs,P]` int32 or int64, -1 for none: page p is rows `p * page` to `(p + 1) * page`. Hs is H, or H*G
            where every query head has a list.
        page: rows of a page, of any relation to those of a group.

    Returns:
        `[B,H,G,P*page]` float32, -inf where a row is not real or no page is named.
    """
    impl = scoring.chosen(impl, query.device, query.dtype, IMPLS)
    if impl == "triton":
        from sparseattn.kernels import lowbit_gpu

        return lowbit_gpu.listed(query, packed, low, step, real, bits, pages, page)
    (batch, heads, _, size), chosen, stored = query.shape, pages.shape[1], real.shape[1]
    rows = stored // max(low.shape[2], 1)
    row = (pages.long()[..., None] * page + torch.arange(page, device=pages.device)).flatten(2)  # [B,Hs,n]
    known = (row >= 0) & (row < stored)
    row = torch.where(known, row, 0)
    known &= real.gather(1, row.flatten(1)).view(row.shape)
    b = torch.arange(batch, device=row.device)[:, None, None]
    h = torch.arange(chosen, device=row.device)[:, None] // (chosen // heads)
    at, inner, side = row // rows, row % rows, tile(packed.device)
    held = packed.unflatten(3, (-1, words(size, bits), side, 4))  # [B,H,N/rows,rows/T,W,T,4]
    codes = planes(held[b, h, at, inner // side, :, inner % side].flatten(3), bits, size)  # [B,Hs,n,D]
    keys = codes.float() * step[b, h, at].float() + low[b, h, at].float()
    asked = (query.float() / size**0.5).view(batch, chosen, -1, size)
    found = (asked @ keys.mT).masked_fill(~known[:, :, None], -torch.inf)  # [B,Hs,H*G/Hs,n]
    return found.view(*query.shape[:3], -1)
