"""Scores of pages by mean and directions as a fused Triton kernel, which reads entries as they are kept.

`score_directions` takes a tile of pages: one product of small matrices for the mean and one for each direction (two for
one of 4 bits, whose halves of channels share bytes), then the estimate, of which kind is a compile-time constant, and
the group's vote. Steps come to the products, so that codes are multiplied as integers. "softmax" votes in a second
launch (`group_vote.gpu`). With a table entries lie in one store, as in `page_bounds`.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.kernels.group_vote.gpu import log_or_inf, log_sum, vote_tiles
from sparseattn.kernels.page_bounds.gpu import TILES, VOTE_BLOCK, adjacent, checked_table, places
from sparseattn.kernels.page_directions.reference import Form, Parts


@triton.jit
def _nibbles(packed, high: tl.constexpr):
    """Return the signed upper or lower 4 bits of int8 bytes."""
    wide = packed.to(tl.int32)
    if high:
        return wide >> 4
    return ((wide & 15) ^ 8) - 8


@triton.jit
def _product(
    vector,  # [BLOCK,1] addresses of the first number of each page's vector
    known,  # [BLOCK] bool
    query,  # of [G,D]
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[BLOCK,BLOCK_G] float32: vectors of whole numbers times the queries."""
    g = tl.arange(0, BLOCK_G)
    total = tl.zeros([BLOCK, BLOCK_G], tl.float32)
    for first in range(0, D, CHUNK):
        d = first + tl.arange(0, CHUNK)
        mask = (g < G)[None, :] & (d < D)[:, None]
        q = tl.load(query + g[None, :] * D + d[:, None], mask=mask, other=0.0)  # [CHUNK,BLOCK_G]
        numbers = tl.load(vector + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0)  # [BLOCK,CHUNK]
        total = tl.dot(numbers.to(q.dtype), q, total, input_precision="ieee")
    return total


@triton.jit
def _product_of_halves(
    vector,
    known,
    query,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As `_product`, of vectors of 4 bits, whose bytes hold a channel of the first half and one of the second."""
    g = tl.arange(0, BLOCK_G)
    half: tl.constexpr = (D + 1) // 2
    total = tl.zeros([BLOCK, BLOCK_G], tl.float32)
    for first in range(0, half, CHUNK):
        j = first + tl.arange(0, CHUNK)
        pairs = tl.load(vector + j[None, :], mask=known[:, None] & (j < half)[None, :], other=0)
        inside = (g < G)[None, :] & (j < half)[:, None]
        low = tl.load(query + g[None, :] * D + j[:, None], mask=inside, other=0.0)
        inside = inside & (half + j < D)[:, None]
        high = tl.load(query + g[None, :] * D + (half + j)[:, None], mask=inside, other=0.0)
        total = tl.dot(_nibbles(pairs, False).to(low.dtype), low, total, input_precision="ieee")
        total = tl.dot(_nibbles(pairs, True).to(high.dtype), high, total, input_precision="ieee")
    return total


# Specialised are strides alone: a page more must not compile a new kernel.
@triton.jit(do_not_specialize=["pages", "known_step_b"])
def score_directions(
    query,  # [B,H,G,D]
    vectors,  # [B,H,P,..] see `Form.names`, any strides but the last; with a table [B,H,entries of the store,..]
    numbers,  # likewise, of 16 bits; or None
    coordinates,  # likewise; or None
    real,  # [B,P]; None with a table
    table,  # [B,P] int32, which entry of the store is a sequence's, negative: none; or None: they lie in order
    out,  # [B,H,P] or, for "each" and "softmax", [B,H,G,P] float32
    tile_lse,  # [B,H,G,tiles] float32; None but for "softmax"
    pages,
    known_step_b,  # of `real`, or of the table
    scale,  # 1 over the temperature
    deviations,
    vector_step_b,
    vector_step_h,
    vector_step_p,
    number_step_b,
    number_step_h,
    number_step_p,
    coordinate_step_b,
    coordinate_step_h,
    coordinate_step_p,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    RANK: tl.constexpr,
    PAGE: tl.constexpr,
    REST: tl.constexpr,
    VOTE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNK: tl.constexpr,  # channels of a product of small matrices, or bytes of a direction of 4 bits
    BLOCK: tl.constexpr,
):
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + h  # of B*H
    g = tl.arange(0, BLOCK_G)
    page = tile * BLOCK + tl.arange(0, BLOCK)
    here = page < pages
    place, known = places(real, table, b.to(tl.int64) * known_step_b + page, page, here)
    # Entries of pages that are not real are not read: they may be NaN, and spare capacity costs nothing.
    query += head * G * D
    vectors += b.to(tl.int64) * vector_step_b + h.to(tl.int64) * vector_step_h
    entry = vectors + (place * vector_step_p)[:, None]  # [BLOCK,1]
    if numbers is not None:
        number = numbers + b.to(tl.int64) * number_step_b + h.to(tl.int64) * number_step_h + place * number_step_p
    served = (g < G)[None, :]
    scores = _product(entry, known, query, G, D, BLOCK, BLOCK_G, CHUNK) * scale
    if BITS < 16:
        scores *= tl.load(number, mask=known, other=0.0).to(tl.float32)[:, None]
    squares = tl.zeros([BLOCK, BLOCK_G], tl.float32)
    if KIND == "clse":
        t = tl.arange(0, PAGE)
        logits = tl.zeros([BLOCK, PAGE, BLOCK_G], tl.float32)
        row_at = coordinates + b.to(tl.int64) * coordinate_step_b + h.to(tl.int64) * coordinate_step_h
        row_at += (place * coordinate_step_p)[:, None]  # [BLOCK,1]
    for k in range(RANK):
        if BITS == 4:
            x = _product_of_halves(entry + (D + k * ((D + 1) // 2)), known, query, G, D, BLOCK, BLOCK_G, CHUNK) * scale
        else:
            x = _product(entry + (1 + k) * D, known, query, G, D, BLOCK, BLOCK_G, CHUNK) * scale
        if BITS < 16:
            x *= tl.load(number + 1 + k, mask=known, other=0.0).to(tl.float32)[:, None]
        squares += x * x
        if KIND == "clse":
            if BITS == 4:  # of a page and direction, all in low halves or all in high ones, or the middle between
                flat = k * PAGE + t
                pairs = tl.load(
                    row_at + (flat % (RANK * PAGE // 2))[None, :], mask=known[:, None] & (t >= 0)[None, :], other=0
                )
                place_of = tl.where((flat < RANK * PAGE // 2)[None, :], _nibbles(pairs, False), _nibbles(pairs, True))
            else:
                place_of = tl.load(row_at + (k * PAGE + t)[None, :], mask=known[:, None] & (t >= 0)[None, :], other=0)
            logits += x[:, None, :] * place_of.to(tl.float32)[:, :, None]
    if REST:
        last: tl.constexpr = 0 if BITS == 16 else 1 + RANK + (PAGE if KIND == "clse" else 0)
        other = tl.load(number + last, mask=known, other=0.0).to(tl.float32)
        lengths = tl.zeros([BLOCK_G], tl.float32)
        for first in range(0, D, CHUNK):
            d = first + tl.arange(0, CHUNK)
            mask = (g < G)[None, :] & (d < D)[:, None]
            q = tl.load(query + g[None, :] * D + d[:, None], mask=mask, other=0.0).to(tl.float32) * scale
            lengths += tl.sum(q * q, 0)
        other = (other * other)[:, None]  # [BLOCK,1]
    if KIND == "clse":
        if BITS < 16:
            rows = number[:, None] + (1 + RANK) + t[None, :]
            steps = tl.load(rows, mask=known[:, None] & (t >= 0)[None, :], other=0.0)
            logits *= steps.to(tl.float32)[:, :, None]
        top = tl.max(logits, 1)
        scores += top + log_or_inf(tl.sum(tl.exp(logits - top[:, None, :]), 1))
        if REST:
            scores += 0.5 * other * tl.maximum(lengths[None, :] - squares, 0.0)
    else:
        if REST:
            squares += other * lengths[None, :]
        if KIND == "ellipsoid":
            scores += deviations * tl.sqrt(squares)
        else:
            scores += 0.5 * squares
    scores = tl.where(known[:, None], scores, float("-inf"))
    if VOTE == "sum" or VOTE == "max":
        if VOTE == "sum":
            voted = tl.sum(tl.where(served, scores, 0.0), 1)
        else:
            voted = tl.max(tl.where(served, scores, float("-inf")), 1)
        tl.store(out + head * pages + page, voted, mask=here)
    else:
        row = head * G + g
        tl.store(out + row[None, :] * pages + page[:, None], scores, mask=served & here[:, None])
        if VOTE == "softmax":
            tl.store(tile_lse + row * tl.num_programs(0) + tile, log_sum(tl.trans(scores)), mask=g < G)


def launch(itemsize: int, size: int, group: int, vote: str, form: Form) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants and options of `score_directions`, for a launch and for compiling ahead alike.

    NOT MEASURED on a GPU yet: tiles are those of `pages`, and for the rows' logits of "clse" as many pages as fit in
    registers, from the compiler's reports, without spills (docs/lab/kernels.md).
    """
    block_d = max(16, triton.next_power_of_2(size))  # 16: the least depth of a tensor core's product
    block_g = max(8, triton.next_power_of_2(group))  # 8: columns of the least one
    block, warps = TILES[itemsize, block_d]
    block = min(block, MOST)
    if form.kind == "clse":
        block = max(16, min(block, LOGITS // (form.page * block_g)))
        warps = 4 if block * form.page * block_g <= 2 * LOGITS else 8
    constants = {
        "KIND": form.kind,
        "BITS": form.bits,
        "RANK": form.rank,
        "PAGE": form.page,
        "REST": form.rest,
        "VOTE": vote,
        "G": group,
        "D": size,
        "BLOCK_G": block_g,
        "CHUNK": min(block_d, CHUNK[itemsize]),
        "BLOCK": block,
    }
    return constants, {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


CHUNK = {2: 128, 4: 32}  # channels of a product by bytes of a query's number
MOST = 32  # pages of a tile: in a loop of products of 64 (tcgen05) the compiler for sm_100 keeps 16 bytes on the stack
LOGITS = 4096  # of rows that a program holds: 32 registers of a thread, of those that 128 have


def scores(query: Tensor, entries: Parts, valid: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `dispatch.scores`, of float32 and 16-bit queries.

    Raises:
        ValueError: an entry's tensor of another dtype than the form has, or whose last stride is not 1.
    """
    return _scores(query, entries, form, group, temperature, valid=adjacent(valid))


def scores_at(query: Tensor, store: Parts, table: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `dispatch.scores_at`; launches depend on shapes alone, so a CUDA graph may hold them.

    Raises:
        ValueError: a table that is not int32, or as `scores`.
    """
    lie = {name: part.transpose(0, 1)[None].expand(len(query), -1, -1, -1) for name, part in store.items()}
    return _scores(query, lie, form, group, temperature, table=checked_table(table))


def _check(entries: Parts, form: Form) -> None:
    for name in form.names:
        part = entries[name]
        coded = name != "numbers" and form.bits < 16
        fits = part.dtype == torch.int8 if coded else part.dtype in (torch.float16, torch.bfloat16)
        if not fits or (part.stride(-1) != 1 and part.shape[-1] > 1):
            wanted = "int8" if coded else "float16 or bfloat16"
            raise ValueError(
                f"{name} of {form.bits} bits are of {wanted} with adjacent elements, got {part.dtype} with last stride "
                f"{part.stride(-1)}"
            )


def _scores(
    query: Tensor,
    entries: Parts,
    form: Form,
    group: str,
    temperature: float,
    *,
    valid: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Return the launches, with one of `valid` and `table`."""
    _check(entries, form)
    known = valid if table is None else table
    assert known is not None
    batch, heads, share, size = query.shape
    pages = known.shape[1]
    constants, options = launch(query.element_size(), size, share, group, form)
    tiles = triton.cdiv(pages, constants["BLOCK"])
    shape = (batch, heads, share, pages) if group in ("each", "softmax") else (batch, heads, pages)
    out = query.new_empty(shape, dtype=torch.float32)
    tile_lse = None
    if group == "softmax":
        tile_lse = query.new_empty(batch, heads, share, tiles, dtype=torch.float32)
    parts = [entries.get(name) for name in ("vectors", "numbers", "coordinates")]
    if pages and batch:
        with torch.cuda.device_of(query):  # Triton launches on the current device
            score_directions[tiles, heads, batch](
                query.contiguous(),
                *parts,
                valid,
                table,
                out,
                tile_lse,
                pages,
                known.stride(0),
                1 / temperature,
                form.deviations,
                *(step for part in parts for step in (part.stride()[:3] if part is not None else (0, 0, 0))),
                **constants,
                **options,
            )
    if tile_lse is not None:
        return vote_tiles(out, tile_lse, VOTE_BLOCK)
    return out.flatten(1, 2) if group == "each" else out
