"""Logits of rows, and the best rows, by product codes of their keys, compiled by numba for the CPU.

A KV head is one thread's work, of all of its query heads (`cpu_choice`).
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import KINDS, LOG2E, array_at, read, storage_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, scratch, use_threads
from sparseattn.kernels.product_codes.codes import (
    BLOCK,
    MORE,
    MOST,
    MOST_BESIDE,
    ProductCodes,
    RankedCodes,
    Tables,
    blocks_apart,
    room_beside,
)
from sparseattn.kernels.product_codes.cpu_angles import BLOCKS_AT, NUMBERS, turning_numbers
from sparseattn.kernels.product_codes.cpu_choice import choose_rows, pack, room, words_needed
from sparseattn.kernels.product_codes.cpu_lists import TILE
from sparseattn.kernels.product_codes.cpu_tables import make_tables, round_tables
from sparseattn.kernels.product_codes.cpu_turning import (
    meet_missed,
    meet_queries,
    room_of_met,
    round_turned,
    turning_room,
)

_room, _room_beside = njit(room), njit(room_beside)
CANDIDATE = 80  # multiplications that take as long as listing a candidate, its vote and its place among the best


@njit
def _take_tail(codes, step, count, valid, total, own):
    """Write the codes of the rows behind whole tiles, 128 a byte, and behind these which are valid, to `own` uint8;
    codes, valid: addresses."""
    left, whole = total % TILE, total // TILE * TILE
    for r in range(count + 1 if left else 0):
        bits_left = array_at(np.uint8, valid + whole if r == count else codes + r * step + whole, left)
        for i in range(left):
            own[r * TILE + i] = bits_left[i]


@entry(parallel=True, cache=True, nogil=True)
def best_by_codes(kinds, numbers, root, query_at, arenas_at, out_at):
    """kinds: of queries, turn and centroids; numbers: of `BestRows`; root: what queries are divided by; ..._at: where
    `[lists,G*D]` of queries, what threads work in, and start and length `[2,lists,S]` of int32 lie."""
    lists, heads, total, apart, more, wanted, most, share, subspaces, entries, size = numbers[:11]
    codes_at, codes_b, codes_h, step, count, bits, valid_at, valid_b = numbers[11:19]
    turn_at, centroids_at, arena_size, workers, wide = numbers[19:24]
    turning, behind = numbers[24 : 24 + NUMBERS], numbers[24 + NUMBERS]
    kind, turn_kind, centroid_kind = kinds
    sampled = (total + BLOCK * apart - 1) // (BLOCK * apart) * BLOCK
    queries = array_at(kind, query_at, lists * share * wide)
    turns = array_at(turn_kind, turn_at, lists * wide * wide)
    book = subspaces * entries * size
    books = array_at(centroid_kind, centroids_at, lists * book)
    out = array_at(np.int32, out_at, 2 * lists * wanted)
    for worker in prange(workers):
        scaled, turned = np.empty(share * wide, np.float32), np.empty(share * wide, np.float32)
        tables = np.empty((share, subspaces, entries), np.float32)
        names, tail = np.empty((share, count * 8 // bits, entries), np.uint8), np.zeros((count + 1) * TILE, np.uint8)
        met, highest = np.empty(room_of_met(turning, share), np.float32), np.zeros(share, np.int16)
        more_missed = np.empty(share * turning[NUMBERS - 1], np.float32)
        words = np.empty(words_needed(share, count * 8 // bits << bits, bits), np.uint64)
        for which in range(worker * lists // workers, (worker + 1) * lists // workers):
            for i in range(share * wide):
                scaled[i] = read(queries, which * share * wide + i) / root
            make_tables(scaled, turns, which * wide * wide, books, which * book,
                        (share, subspaces, entries, size, wide), turned, tables)  # fmt: skip
            arena = arenas_at + worker * arena_size
            shortest, added, stride = np.float32(0), 0, 0
            if turning[0]:
                meet_missed(turning, which, turned, share, wide, more_missed)
                shortest = meet_queries(turning, which, scaled, share, more_missed, met)
                shortest /= np.float32(_room_beside(subspaces))
            grain = round_tables(tables, names, shortest)
            if turning[0]:
                added, stride = round_turned(turning, which, share, met, more_missed, grain, arena + behind, highest)
            unit = grain * LOG2E
            pack(names.reshape(share, -1), share, words)
            b, h = which // heads, which % heads
            first, there = codes_at + b * codes_b + h * codes_h, valid_at + b * valid_b
            _take_tail(first, step, count, there, total, tail)
            stored = first, step, count, bits, there
            given = names.ctypes.data, share, words.ctypes.data, added, stride, highest.ctypes.data
            ends = tail.ctypes.data
            own = out[which * wanted : (which + 1) * wanted]
            chosen = choose_rows(stored, given, ends, total, apart, more, unit, most, sampled, arena, own)
            if chosen < 0:
                every = (total + TILE - 1) // TILE * TILE + TILE
                larger = np.empty(_room(share, count, bits, sampled, every)[-1], np.uint8)
                chosen = choose_rows(
                    stored, given, ends, total, apart, more, unit, every, sampled, larger.ctypes.data, own
                )
                larger[0] = 0  # which is held until here
            for i in range(wanted):
                out[(lists + which) * wanted + i] = i < chosen
                own[i] = own[i] if i < chosen else 0


@njit
def logits_of(codes, at, step, count, bits, tables, ids, out):
    """Return the logits of the rows `ids` `[C]` of one KV head, -inf for -1: `out` `[G,C]`; tables: `[G,M,K]`."""
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
        logits_of(codes, b * steps[0] + h * steps[1], steps[2], count, bits, tables[which], ids,
                   out[which, :, first : first + len(ids)])  # fmt: skip


def stored(keys: ProductCodes) -> Any:
    """Return what a kernel takes of codes and of which rows are valid, in two parts."""
    steps = keys.codes.stride()
    if steps[3] != 1 and keys.codes.shape[3] > 1:
        raise ValueError(f"the compiled kernel reads codes whose rows are adjacent: the last stride is 1, got {steps}")
    valid = keys.valid if keys.valid.stride(-1) == 1 else keys.valid.contiguous()
    codes = storage_of(keys.codes), steps[:3], keys.codes.shape[2], keys.bits
    return codes, (storage_of(valid.view(torch.uint8)), valid.stride(0) if len(valid) > 1 else 0)


def padded(tables: Tensor, keys: ProductCodes) -> Tensor:
    """`[lists,G,M,K]` float32, M as many as the bytes have codes: one more of zeros where a byte has one alone."""
    missing = keys.codes.shape[2] * 8 // keys.bits - tables.shape[3]
    return torch.nn.functional.pad(tables, (0, 0, 0, missing)).flatten(0, 1).contiguous()


def logits(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.logits`."""
    batch, heads, share, subspaces = tables.shape[:4]
    rows = keys.codes.shape[3]
    out = torch.empty(batch, heads, share, rows)
    codes, valid = stored(keys)
    with ONE_AT_A_TIME:
        use_threads(batch * heads * share * subspaces * rows)
        _logits(*codes, padded(tables, keys).numpy(), heads, *valid, out.flatten(0, 1).numpy())
    return out


class BestRows:
    """What the choices of steps have in common, looked up once.

    Args:
        query: `[B,H,G,D]`, one such as is given at each step.
        ranked: what ranks the rows, which stay where they are.
        count: rows that are chosen for each KV head, if there are as many.

    Attributes:
        lists: KV heads of all sequences.
        count: rows chosen for each of them.
        arenas: bytes that a choice works in.
        work: multiplications that it takes about as long as.

    Raises:
        ValueError: codes that the compiled kernel cannot read.
    """

    def __init__(self, query: Tensor, ranked: RankedCodes, count: int) -> None:
        keys, batch, heads, share = ranked.keys, *query.shape[:3]
        subspaces, entries, size = ranked.centroids.shape[2:]
        width, rows = keys.codes.shape[2:]
        most_of = MOST if ranked.beside is None else MOST_BESIDE
        if subspaces > most_of:
            raise ValueError(f"sums of 16 bits hold {most_of} subspaces, got {subspaces}")
        if width != -(-subspaces * keys.bits // 8):
            raise ValueError(f"{subspaces} codes of {keys.bits} bits do not fill {width} bytes")
        steps = keys.codes.stride()
        if steps[3] != 1 and rows > 1:
            raise ValueError(f"the kernel reads codes whose rows are adjacent: the last stride is 1, got {steps}")
        self.lists, self.count, apart = batch * heads, min(count, rows), blocks_apart(rows)
        more = min(MORE * count, rows)
        turn, centroids = ranked.turn.contiguous(), ranked.centroids.contiguous()
        valid = keys.valid if keys.valid.stride(1) == 1 else keys.valid.contiguous()
        turning, held = turning_numbers(ranked.beside, heads, query.shape[3])
        self.held = keys.codes, turn, centroids, valid, *held  # addresses hold nothing
        most = (2 * more + 4 * TILE) // TILE * TILE  # where more are listed, a thread makes room for all
        sampled = -(-rows // (BLOCK * apart)) * BLOCK
        behind = -(-room(share, width, keys.bits, sampled, most)[-1] // 4096) * 4096
        more_room = turning_room(share, rows, int(turning[BLOCKS_AT])) if held else 0
        arena = behind + -(-more_room // 4096) * 4096
        workers = max(min(torch.get_num_threads(), self.lists), 1)
        self.arenas = workers * arena
        self.work = self.lists * (share * subspaces * rows / 16 + CANDIDATE * more)
        self.work += self.lists * share * rows * query.shape[3] / 16 if held else 0
        self.factor = np.float32(ranked.temperature)
        self.kinds = KINDS[query.dtype], KINDS[turn.dtype], KINDS[centroids.dtype]
        self.numbers = np.array(
            [
                self.lists, heads, rows, apart, more, self.count, most, share, subspaces, entries, size,
                keys.codes.data_ptr(), *steps[:3], width, keys.bits, valid.data_ptr(), valid.stride(0),
                turn.data_ptr(), centroids.data_ptr(), arena, workers, query.shape[3],
                *turning, behind,
            ],
            np.int64,
        )  # fmt: skip


def best(tables: Tables, keys: ProductCodes, count: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.best`."""
    query = tables.query.contiguous()
    rows = BestRows(query, RankedCodes(tables.turn, tables.centroids, tables.temperature, keys, tables.beside), count)
    out = torch.empty(2, *query.shape[:2], rows.count, dtype=torch.int32)
    if not out.numel():
        return out[0], out[1]
    with ONE_AT_A_TIME:
        use_threads(rows.work)
        best_by_codes(
            rows.kinds, rows.numbers, rows.factor, query.data_ptr(), scratch(rows.arenas).data_ptr(), out.data_ptr()
        )
    return out[0], out[1]
