"""Logits of rows, and the best rows, by product codes of their keys, as fused Triton kernels.

`sum_rows` reads the codes of a tile of rows once for all query heads of a KV head. A subspace's tables are looked up
within the program, in registers or in its shared memory: by `tl.gather`, as the compiler lays it out. With tables
rounded to 8 bits a number of 32 bits holds the sums of two query heads, and `below_tops` finds in a second launch how
near each row is. What rows have beside their codes torch makes, and adds to sums between the launches. Candidates are
rows that a list names: `sum_rows` looks them up again, and their vote is a launch of `group_vote.gpu`.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.kernels.group_vote.gpu import log_sum, vote_tiles
from sparseattn.kernels.page_bounds.gpu import adjacent
from sparseattn.kernels.product_codes.codes import MORE, MOST, ProductCodes, Tables, rounded, sampled, spans
from sparseattn.kernels.product_codes.reference import offsets
from sparseattn.kernels.topk.gpu import best_rows

WIDE = tl.constexpr(16)  # rows


@triton.jit
def _looked_up(tables, which, code, LINES: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_P: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """`[P*BLOCK]`, of every line the numbers of subspace `which` at codes `[BLOCK]`; tables: `[2R or R,LINES,K]`."""
    at = tl.arange(0, BLOCK_P * ENTRIES)
    table = tl.load(tables + which * (LINES * ENTRIES) + at, mask=at < LINES * ENTRIES, other=0)
    place = tl.arange(0, BLOCK_P)[:, None] * ENTRIES + code[None, :]
    return tl.gather(table, tl.reshape(place, [BLOCK_P * BLOCK]), 0)  # of one dimension: from shared memory


# Specialised are strides alone: a row more must not compile a new kernel.
@triton.jit(do_not_specialize=["rows", "valid_step_b"])
def sum_rows(
    tables,  # [B,L,2R or R,LINES,K] float32 of query heads, or int32 of two query heads each
    codes,  # [B,H,R,N] uint8, any strides but the last
    valid,  # [B,N]
    ids,  # [B,L,rows] int32, which row is looked up, negative: none; None: all in order
    out,  # [B,L,LINES,rows], as tables
    tile_fact,  # [B,L,LINES,tiles] float32, log-sum-exps; of integers [B,L,2 LINES,tiles] int32, the best; or None
    rows,
    valid_step_b,
    codes_step_b,
    codes_step_h,
    codes_step_r,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,  # R
    EACH: tl.constexpr,  # lists of a KV head, L / H
    LINES: tl.constexpr,  # query heads, or pairs of them, of a list
    EVEN: tl.constexpr,  # whether rows are a multiple of WIDE, all in order
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of table entries by the codes of rows; floats are logits, -inf where a row is not valid."""
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + h  # of B*L
    kind = tables.dtype.element_ty
    entries: tl.constexpr = 1 << BITS
    each: tl.constexpr = 8 // BITS  # codes of a byte
    p = tl.arange(0, BLOCK_P)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    here = place < rows
    if ids is None:
        row = place.to(tl.int64)
        known = here
    else:
        row = tl.load(ids + head * rows + place, mask=here, other=-1).to(tl.int64)
        known = here & (row >= 0)
    known = known & (tl.load(valid + b.to(tl.int64) * valid_step_b + row, mask=known, other=0) != 0)
    count = tl.max(known.to(tl.int32), 0) * BYTES  # of a tile without a valid row none: spare capacity costs nothing
    if EVEN:  # one mask for WIDE rows, so that a thread loads several codes at once
        read = place // WIDE * WIDE < rows
    else:
        read = known
    codes += b.to(tl.int64) * codes_step_b + (h // EACH).to(tl.int64) * codes_step_h + row
    tables += head * (BYTES * each * LINES * entries)
    total = tl.zeros([BLOCK_P * BLOCK], kind)
    for r in range(count):
        code = tl.load(codes, mask=read, other=0).to(tl.int32)
        for c in tl.static_range(each):
            own = (code >> (BITS * c)) & (entries - 1)
            total += _looked_up(tables, each * r + c, own, LINES, entries, BLOCK_P, BLOCK)
        codes += codes_step_r
    total = tl.reshape(total, [BLOCK_P, BLOCK])
    line = head * LINES + p
    if kind == tl.float32:
        total = tl.where(known[None, :], total, float("-inf"))
        if tile_fact is not None:
            tl.store(tile_fact + line * tl.num_programs(0) + tile, log_sum(total), mask=p < LINES)
    tl.store(out + line[:, None] * rows + place[None, :], total, mask=(p < LINES)[:, None] & here[None, :])


@triton.jit(do_not_specialize=["rows", "heads", "valid_step_b"])
def below_tops(
    sums,  # [B,H,LINES,N] int32, of two query heads each
    tops,  # [B,H,2 LINES] int32
    valid,  # [B,N]
    out,  # [B,H,N] float32
    rows,
    heads,  # H
    valid_step_b,
    G: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """By how much a row's sum exceeds a query head's number of `tops`, at the head where that is most; -inf where it is
    not valid."""
    head = tl.program_id(1).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    line = head * LINES + p
    low = tl.load(tops + 2 * line, mask=p < LINES, other=0)
    high = tl.load(tops + 2 * line + 1, mask=p < LINES, other=0)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    both = tl.load(sums + line[:, None] * rows + row[None, :], mask=(p < LINES)[:, None] & here[None, :], other=0)
    least: tl.constexpr = -(1 << 30)  # below all differences
    first = tl.where((2 * p < G)[:, None], (both & 0xFFFF) - low[:, None], least)
    second = tl.where((2 * p + 1 < G)[:, None], (both >> 16) - high[:, None], least)
    nearest = tl.max(tl.maximum(first, second), 0).to(tl.float32)
    real = tl.load(valid + (head // heads) * valid_step_b + row, mask=here, other=0) != 0
    tl.store(out + head * rows + row, tl.where(real, nearest, float("-inf")), mask=here)


# NOT MEASURED on a GPU yet: from the compiler's reports, without spills (docs/lab/kernels.md).
HELD = 2048  # sums of a program
LEAST_ROWS, MOST_ROWS = 64, 1024  # of a program
VOTE_BLOCK = 512  # candidates that one program of `vote_softmax` votes on
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def launch(lines: int, bits: int, count: int, even: bool, each: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the compile-time constants and options of `sum_rows`, for a launch and for compiling ahead alike.

    Args:
        lines: query heads whose tables are of floats, or pairs of them.
        bits: of a code.
        count: bytes of a row.
        even: whether rows are a multiple of 16, all in order.
        each: lists of a KV head.
    """
    block_p = triton.next_power_of_2(lines)
    block = max(min(HELD // block_p, MOST_ROWS), LEAST_ROWS)
    constants = {"BITS": bits, "BYTES": count, "EACH": each, "LINES": lines, "EVEN": even}
    return constants | {"BLOCK_P": block_p, "BLOCK": block}, OPTIONS


def launch_tops(group: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `launch`, for `below_tops`: of `group` query heads a KV head."""
    lines = -(-group // 2)
    block_p = triton.next_power_of_2(lines)
    block = max(min(HELD // block_p, MOST_ROWS), LEAST_ROWS)
    return {"G": group, "LINES": lines, "BLOCK_P": block_p, "BLOCK": block}, OPTIONS


def _laid(tables: Tensor, keys: ProductCodes) -> Tensor:
    """Return tables `[B,L,G,M,K]` as the kernel reads them, `[B,L,M,G,K]`: M as many as the bytes have codes, one more
    of zeros where a byte has one alone."""
    missing = keys.codes.shape[2] * 8 // keys.bits - tables.shape[3]
    return torch.nn.functional.pad(tables, (0, 0, 0, missing)).transpose(2, 3).contiguous()


def _sums(laid: Tensor, keys: ProductCodes, ids: Tensor | None, facts: bool) -> tuple[Tensor, Tensor | None]:
    """Launch `sum_rows`: sums `[B,L,LINES,rows]` and, if asked for, what each tile's are together."""
    codes = keys.codes
    if codes.stride(3) != 1 and codes.shape[3] > 1:
        raise ValueError(f"the kernel reads codes whose rows are adjacent: the last stride is 1, got {codes.stride()}")
    batch, lists, _, lines, _ = laid.shape
    rows = codes.shape[3] if ids is None else ids.shape[2]
    even = ids is None and not rows % WIDE.value
    constants, options = launch(lines, keys.bits, codes.shape[2], even, lists // codes.shape[1])
    tiles, valid = triton.cdiv(rows, constants["BLOCK"]), adjacent(keys.valid)
    out = laid.new_empty(batch, lists, lines, rows)
    tile_fact = laid.new_empty(batch, lists, lines, tiles) if facts else None
    if out.numel():
        with torch.cuda.device_of(codes):  # Triton launches on the current device
            sum_rows[tiles, lists, batch](
                laid,
                codes,
                valid,
                None if ids is None else ids.contiguous(),
                out,
                tile_fact,
                rows,
                valid.stride(0),
                *codes.stride()[:3],
                **constants,
                **options,
            )
    return out, tile_fact


def logits(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.logits`."""
    return _sums(_laid(tables, keys), keys, None, False)[0]


def nearest(names: Tensor, step: Tensor, keys: ProductCodes, added: Tensor | None = None) -> Tensor:
    """As `reference.nearest`, by tables rounded to 8 bits, `[B,H,G,M,K]` uint8, their step `[B,H]`, and what is added
    to sums, `[B,H,G,N]` in whole steps."""
    (batch, heads, group, subspaces), rows = names.shape[:4], keys.codes.shape[3]
    if subspaces > MOST:
        raise ValueError(f"sums of 16 bits hold {MOST} subspaces, got {subspaces}")
    sums, _ = _sums(_laid(_paired(names), keys), keys, None, False)
    if added is not None:
        sums += _paired(added)
    among = sampled(rows, sums.device)
    few = sums[..., among]
    few = torch.stack([few & 0xFFFF, few >> 16], 3).flatten(2, 3)
    valid = adjacent(keys.valid)
    tops = offsets(few, step, valid[:, among]).int().contiguous()
    out = torch.empty(batch, heads, rows, device=sums.device)
    if out.numel():
        constants, options = launch_tops(group)
        with torch.cuda.device_of(out):
            below_tops[triton.cdiv(rows, constants["BLOCK"]), batch * heads](
                sums, tops, valid, out, rows, heads, valid.stride(0), **constants, **options
            )
    return out


def _paired(numbers: Tensor) -> Tensor:
    """Return whole numbers `[B,H,G,...]` of 15 bits of two query heads each, `[B,H,LINES,...]` int32."""
    ends = torch.nn.functional.pad(numbers.int(), (0, 0) * (numbers.ndim - 3) + (0, numbers.shape[2] % 2))
    pairs = ends.unflatten(2, (-1, 2))
    return pairs[:, :, :, 0] | pairs[:, :, :, 1] << 16


def sums_of_listed(tables: Tensor, keys: ProductCodes, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits `[B,L,G,C]` of the rows `ids` `[B,L,C]` int32, -inf for negative, by tables `[B,L,G,M,K]`, L a
    multiple of H; and each tile's log-sum-exps."""
    listed, tile_lse = _sums(_laid(tables, keys), keys, ids, True)
    assert tile_lse is not None
    return listed, tile_lse


def voted(tables: Tensor, keys: ProductCodes, ids: Tensor) -> Tensor:
    """Return the group's vote "softmax" `[B,H,C]` float32 among the rows `ids` `[B,H,C]` int32, -inf for negative."""
    return vote_tiles(*sums_of_listed(tables, keys, ids), VOTE_BLOCK)


def voted_beside(names: Tensor, step: Tensor, keys: ProductCodes, ids: Tensor, added: Tensor) -> Tensor:
    """As `voted`, by what `nearest` takes: sums are whole steps, so that those of equal rows are equal."""
    listed, _ = _sums(_laid(names.float(), keys), keys, ids, False)
    listed += added.gather(3, ids.clamp(min=0).long()[:, :, None].expand_as(listed))
    listed *= step[:, :, None, None]
    return vote_tiles(listed, listed.logsumexp(3, keepdim=True), VOTE_BLOCK)


def best(tables: Tables, keys: ProductCodes, count: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.best`; of rows as near as the last candidate it leaves open which are candidates."""
    bounds = tables.bounds()
    names, step, _ = rounded(tables.numbers(), bounds)
    added = tables.steps_beside(step, bounds)
    candidates = best_rows(nearest(names, step, keys, added), MORE * count)  # [B,H,C]
    if added is None:
        votes = voted(names * step[:, :, None, None, None], keys, candidates)
    else:
        votes = voted_beside(names, step, keys, candidates, added)
    chosen = best_rows(votes, count)
    return spans(candidates.gather(2, chosen.clamp(min=0).long()).masked_fill(chosen < 0, -1))
