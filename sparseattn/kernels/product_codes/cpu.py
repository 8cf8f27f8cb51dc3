"""Logits of rows, and the best rows, by product codes of their keys, compiled by numba for the CPU.

A KV head is one thread's work, of all of its query heads: two passes over its codes find how far each row is below the
best, its candidates vote, and what a thread needs stays in its cache.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.group_vote.cpu import vote_of_group
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import storage_of
from sparseattn.kernels.numba_threads import EXPONENTIAL, ONE_AT_A_TIME, use_threads
from sparseattn.kernels.product_codes.codes import MORE, MOST, ProductCodes, rounded
from sparseattn.kernels.product_codes.cpu_sums import BLOCK, SHUFFLES, below_tops, raise_tops, shuffled_sums
from sparseattn.kernels.topk.cpu import best as best_of

PAIRS = 2  # of query heads, whose sums of 16 bits a number of 64 bits holds
BELOW_ALL = 0x7FFF  # the best sum of a query head that is not there


@njit
def _added(codes, at, step, count, bits, fours, first, sums):
    """`sums[4 f: ...]`, pairs of query heads of 64 rows as `shuffled_sums` has them, by tables of four heads: `fours`
    `[lists,F,M,K]` uint64."""
    tables = fours[first]
    for f in range(len(tables)):
        for n in range(BLOCK):
            total = np.uint64(0)
            for r in range(count):
                code = codes[at + r * step + n]
                if bits == 8:
                    total += tables[f, r, code]
                else:
                    total += tables[f, 2 * r, code & 15] + tables[f, 2 * r + 1, code >> 4]
            sums[PAIRS * f * BLOCK + n] = np.uint32(total & np.uint64(0xFFFFFFFF))
            sums[(PAIRS * f + 1) * BLOCK + n] = np.uint32(total >> np.uint64(32))


@njit
def _sums_of_block(codes, at, step, count, bits, pairs, fours, which, sums):
    """Of 64 rows the sums of every pair of query heads, `sums` `[P,64]` flat; pairs: `[lists,P,M,16]` uint32 or, where
    tables do not lie in registers, with M 0."""
    size = pairs.shape[2]
    if size:
        flat, own = pairs.reshape(-1), pairs.shape[1]
        for p in range(own):
            shuffled_sums(codes, at, step, count, flat, (which * own + p) * size * 16, sums, p * BLOCK)
    else:
        _added(codes, at, step, count, bits, fours, which, sums)


@njit
def _tail(codes, at, step, count, valid, mark, rows, own, marks):
    """Copy the last `rows` rows, fewer than 64, to `own` `[R * 64]` and `marks` `[64]`, which others are not valid."""
    marks[:] = 0
    marks[:rows] = valid[mark : mark + rows]
    for r in range(count):
        own[r * BLOCK : (r + 1) * BLOCK] = 0
        own[r * BLOCK : r * BLOCK + rows] = codes[at + r * step : at + r * step + rows]


@njit
def _below(codes, at, step, count, bits, pairs, fours, which, share, valid, mark, rows, out):
    """`out` `[rows up to 64s]`: `relative` of one KV head."""
    many = pairs.shape[1]
    sums, tops = np.empty(many * BLOCK, np.uint32), np.zeros(many * 16, np.uint32)
    whole, left = rows // BLOCK * BLOCK, rows % BLOCK
    own, marks = np.empty(count * BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
    if left:
        _tail(codes, at + whole, step, count, valid, mark + whole, left, own, marks)
        _sums_of_block(own, 0, BLOCK, count, bits, pairs, fours, which, sums)
        for p in range(many):
            raise_tops(sums, p * BLOCK, marks, 0, tops, p * 16)
    for n in range(0, whole, BLOCK):
        _sums_of_block(codes, at + n, step, count, bits, pairs, fours, which, sums)
        for p in range(many):
            raise_tops(sums, p * BLOCK, valid, mark + n, tops, p * 16)
    best = np.empty(many, np.uint32)
    for p in range(many):
        low, high = np.uint32(0), np.uint32(0)
        for lane in range(16):
            low = max(low, tops[p * 16 + lane] & np.uint32(0xFFFF))
            high = max(high, tops[p * 16 + lane] >> np.uint32(16))
        low = low if 2 * p < share else np.uint32(BELOW_ALL)
        high = high if 2 * p + 1 < share else np.uint32(BELOW_ALL)
        best[p] = low | high << np.uint32(16)
    for n in range(0, whole, BLOCK):
        _sums_of_block(codes, at + n, step, count, bits, pairs, fours, which, sums)
        below_tops(sums, 0, many, best, 0, valid, mark + n, out, n)
    if left:
        _sums_of_block(own, 0, BLOCK, count, bits, pairs, fours, which, sums)
        below_tops(sums, 0, many, best, 0, marks, 0, out, whole)


@entry(parallel=True, cache=True, nogil=True)
def _relative(codes, steps, count, bits, pairs, fours, heads, share, valid, valid_step, out):
    """out: `[lists,N]`."""
    lists, rows = out.shape
    for which in prange(lists):
        b, h = which // heads, which % heads
        line = np.empty((rows + BLOCK - 1) // BLOCK * BLOCK, np.float32)
        _below(codes, b * steps[0] + h * steps[1], steps[2], count, bits, pairs, fours, which, share, valid,
               b * valid_step, rows, line)  # fmt: skip
        out[which] = line[:rows]


@njit
def _logits_of(codes, at, step, count, bits, tables, ids, out):
    """The logits of the rows `ids` `[C]` of one KV head, -inf for -1: `out` `[G,C]`; tables: `[G,M,K]`."""
    for i in range(len(ids)):
        if ids[i] < 0:
            out[:, i] = -np.inf
            continue
        out[:, i] = 0
        for r in range(count):
            code = codes[at + r * step + ids[i]]
            for g in range(len(out)):
                if bits == 8:
                    out[g, i] += tables[g, r, code]
                else:
                    out[g, i] += tables[g, 2 * r, code & 15] + tables[g, 2 * r + 1, code >> 4]


@entry(parallel=True, cache=True, nogil=True)
def _best(codes, steps, count, bits, tables, pairs, fours, heads, valid, valid_step, rows, candidates, ids):
    """tables: `[lists,G,M,K]` float32; ids: `[lists,S]` int32."""
    share = tables.shape[1]
    for which in prange(len(ids)):
        b, h = which // heads, which % heads
        at = b * steps[0] + h * steps[1]
        line = np.empty((rows + BLOCK - 1) // BLOCK * BLOCK, np.float32)
        _below(codes, at, steps[2], count, bits, pairs, fours, which, share, valid, b * valid_step, rows, line)
        listed = np.empty(candidates, np.int32)
        best_of(line, listed)
        logits, votes = np.empty((share, candidates), np.float32), np.empty((2, candidates), np.float32)
        _logits_of(codes, at, steps[2], count, bits, tables[which], listed, logits)
        vote_of_group(logits, votes[0], votes[1])
        best_of(votes[0], ids[which])
        for i in range(ids.shape[1]):
            if ids[which, i] >= 0:
                ids[which, i] = listed[ids[which, i]]


@entry(parallel=True, cache=True, nogil=True)
def _logits(codes, steps, count, bits, tables, heads, valid, valid_step, out):
    """tables: `[lists,G,M,K]`; out: `[lists,G,N]`."""
    lists, _, rows = out.shape
    parts = (rows + 2047) // 2048
    for work in prange(lists * parts):
        which, first = work // parts, work % parts * 2048
        b, h = which // heads, which % heads
        ids = np.empty(min(2048, rows - first), np.int32)
        for i in range(len(ids)):
            ids[i] = first + i if valid[b * valid_step + first + i] else -1
        _logits_of(codes, b * steps[0] + h * steps[1], steps[2], count, bits, tables[which], ids,
                   out[which, :, first : first + len(ids)])  # fmt: skip


def _stored(keys: ProductCodes) -> Any:
    """What a kernel takes of codes and of which rows are valid, in two parts."""
    steps = keys.codes.stride()
    if steps[3] != 1 and keys.codes.shape[3] > 1:
        raise ValueError(f"the compiled kernel reads codes whose rows are adjacent: the last stride is 1, got {steps}")
    valid = keys.valid if keys.valid.stride(-1) == 1 else keys.valid.contiguous()
    codes = storage_of(keys.codes), steps[:3], keys.codes.shape[2], keys.bits
    return codes, (storage_of(valid.view(torch.uint8)), valid.stride(0) if len(valid) > 1 else 0)


def _padded(tables: Tensor, keys: ProductCodes) -> Tensor:
    """`[lists,G,M,K]` float32, M as many as the bytes have codes: one more of zeros where a byte has one alone."""
    missing = keys.codes.shape[2] * 8 // keys.bits - tables.shape[3]
    return torch.nn.functional.pad(tables, (0, 0, 0, missing)).flatten(0, 1).contiguous()


def _whole(tables: Tensor, keys: ProductCodes) -> tuple[Any, Any]:
    """Tables of 8 bits, those of two query heads in a number of 32 bits `[lists,P,M,16]`, where they lie in registers,
    and those of four in one of 64 bits `[lists,F,M,K]`; the other is empty."""
    if tables.shape[3] > MOST:
        raise ValueError(f"sums of 16 bits hold {MOST} subspaces, got {tables.shape[3]}")
    names = _padded(rounded(tables)[0], keys)  # [lists,G,M,K] uint8
    shuffled = keys.bits == 4 and SHUFFLES > 0
    each = 2 if shuffled else 4
    names = torch.nn.functional.pad(names, (0, 0, 0, 0, 0, -names.shape[1] % each)).unflatten(1, (-1, each))
    joined = torch.zeros_like(names[:, :, 0], dtype=torch.int64)
    for g in range(each):
        joined |= names[:, :, g].long() << 16 * g
    lists, joins = joined.shape[:2]
    if shuffled:
        return joined.int().numpy().view(np.uint32), np.empty((lists, 0, 0, 0), np.uint64)
    return np.empty((lists, PAIRS * joins, 0, 0), np.uint32), joined.numpy().view(np.uint64)


def _work(tables: Tensor, keys: ProductCodes) -> float:
    """Of two passes, by multiplications that take as long."""
    return tables.shape[:4].numel() * keys.codes.shape[3] / 4.0


def logits(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.logits`."""
    batch, heads, share = tables.shape[:3]
    out = torch.empty(batch, heads, share, keys.codes.shape[3])
    codes, valid = _stored(keys)
    with ONE_AT_A_TIME:
        use_threads(4 * _work(tables, keys))
        _logits(*codes, _padded(tables, keys).numpy(), heads, *valid, out.flatten(0, 1).numpy())
    return out


def relative(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.relative`."""
    batch, heads, share = tables.shape[:3]
    out = torch.empty(batch, heads, keys.codes.shape[3])
    codes, valid = _stored(keys)
    with ONE_AT_A_TIME:
        use_threads(_work(tables, keys))
        _relative(*codes, *_whole(tables, keys), heads, share, *valid, out.flatten(0, 1).numpy())
    return out


def best(tables: Tensor, keys: ProductCodes, count: int) -> Tensor:
    """As `dispatch.best`."""
    batch, heads, share = tables.shape[:3]
    rows = keys.codes.shape[3]
    candidates = min(MORE * count, rows)
    ids = torch.empty(batch, heads, min(count, rows), dtype=torch.int32)
    codes, valid = _stored(keys)
    with ONE_AT_A_TIME:
        use_threads(_work(tables, keys) + EXPONENTIAL * batch * heads * share * candidates)
        _best(
            *codes, _padded(tables, keys).numpy(), *_whole(tables, keys), heads, *valid, rows, candidates,
            ids.flatten(0, 1).numpy(),
        )  # fmt: skip
    return ids
