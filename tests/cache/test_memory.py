"""What a cache holds and what a step takes besides: as recorded, measured anew, and by laws of the cache."""

from __future__ import annotations

import json
import weakref
import zlib

import pytest
import torch

pytest.importorskip("faiss")
pytest.importorskip("numba")

from benchmarks import memory
from benchmarks.records import RESULTS
from sparseattn import KVCache, QueryBridge, decode
from sparseattn.cache.query_buffers import sampled
from tests.cases import CASES, FEW, ON_DEVICE, Case, Heaviest, by_case, by_name, heads

RECORD = json.loads((RESULTS / f"{memory.NAME}.json").read_text())
ROWS = {row["method"]: row for row in RECORD["results"]}
# To build; and further settings of methods that are measured with their own. Of the others two in three.
SLOW = ("bridge", "hnsw", "pq", "retrieval", "robustvamana", *memory.SETTINGS)
SLOW += tuple(spec for spec in memory.SPECS if spec not in FEW and zlib.crc32(spec.encode()) % 3)
AGAIN = "measure it: python -m scripts.evidence --only memory --again"


def test_every_method_is_measured() -> None:
    assert list(ROWS) == memory.SPECS, AGAIN
    assert memory.artefact() == RECORD["artefact"]


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.slow] * (spec in SLOW)) for spec in memory.SPECS]
)
def test_what_is_kept_and_what_a_step_takes_is_what_was_measured(spec: str) -> None:
    row = ROWS[spec]
    kept, taken = memory.kept(spec), memory.taken(spec)
    assert kept == {name: row[name] for name in kept}, AGAIN
    assert taken == {name: pytest.approx(row[name], rel=0.05) for name in taken}, AGAIN  # torch's releases differ


def filled(case: Case, dtype: torch.dtype, apart: str | None) -> KVCache:
    """A cache through a prefill, in two sequences of different length, and decoding with several seals."""
    first, last = 600, 670
    queries, keys, values = heads(2, 2, 2, last, 16, dtype)
    cache = KVCache(case.make(), sink=4, window=16, seal=32, sealed_device=apart, check=False)
    positions = torch.arange(first).expand(2, -1).clone()
    positions[-1, :250] = -1
    positions[-1, 250:] -= 250
    cache.append(keys[:, :, :first], values[:, :, :first], queries[:, :, :, :first], positions)
    cache.seal()
    for t in range(first, last):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1], queries[:, :, :, t : t + 1])
        cache.seal()
    decode(queries[:, :, :, -1].contiguous(), cache, 64)
    return cache


def books(cache: KVCache) -> int:
    """Bytes that two sequences of two heads take for positions, which rows are real or valid, and queries that wait."""
    waiting = [
        int(sampled(torch.arange(cache.sink + int(sealed), int(rows)), cache.selector.queries_wanted[0]).sum())
        for rows, sealed in zip(cache.lengths, cache.sealed, strict=True)
    ]
    share, over = cache.selector.queries_wanted[0], cache.selector.all_learn_once and bool(cache.sealed.all())
    entries = 2 * 2 * 2 * max(waiting) * 16 * cache.keys.element_size() if share and not over else 0
    return 2 * 8 * cache.keys.shape[2] + (2 * 2 + 2) * cache.stored.sealed_keys.shape[2] + entries


@by_case(CASES, dtype={"float32": torch.float32, "bfloat16": torch.bfloat16})
@pytest.mark.filterwarnings("ignore:.*no queries of the prefill:UserWarning")
def test_bytes_are_those_of_the_rows_wherever_they_lie(case: Case, dtype: torch.dtype) -> None:
    """Keys, values and books by their shapes; what a selector holds is as much for sealed rows in another place."""
    joint, apart = (filled(case, dtype, place) for place in (None, "cpu"))
    rows = joint.keys.shape[2]
    assert rows == apart.keys.shape[2] + apart.stored.sealed_keys.shape[2]
    held, there = joint.nbytes, apart.nbytes
    assert held.pop("kv") == there.pop("kv") == 2 * 2 * 2 * rows * 16 * dtype.itemsize
    assert (held.pop("books"), there.pop("books")) == (books(joint), books(apart))
    assert held == there


@pytest.mark.parametrize(("bits", "group", "size"), [(8, 32, 40), (4, 16, 15)])
def test_rounded_rows_take_their_codes_and_levels(bits: int, group: int, size: int) -> None:
    _, keys, values = heads(2, 2, 2, 400, size, torch.bfloat16)
    cache = KVCache("quest", sink=4, window=16, seal=32, rows=f"kivi:bits={bits},group={group}")
    cache.append(keys, values)
    cache.seal()
    near = 20 + (400 - 20) % cache.unit
    row = 2 * ((size * bits + 7) // 8) + 4 * ((size + 31) // 32)  # two codes, and the levels of the value
    levels = 4 * (400 - near) // group * size  # of the keys
    assert cache.nbytes["kv"] == 2 * 2 * (2 * near * size * 2 + (400 - near) * row + levels)


@pytest.mark.parametrize("apart", [None, "cpu"])
def test_compacting_frees_the_rows_that_are_dropped(apart: str | None) -> None:
    """And the prompt's last queries are held until they are handed over."""
    queries, keys, values = heads(2, 2, 3, 500, 16)
    cache = KVCache(Heaviest(70), sink=4, window=16, seal=32, rollback=5, sealed_device=apart)
    cache.append(keys, values, queries)
    assert cache.nbytes["books"] == books(cache) + 2 * 2 * 3 * (3 + 1 + 16 + 5) * 16 * 4
    cache.seal()
    before = cache.nbytes
    assert before["books"] == books(cache)
    assert cache.compact() == 475 - 70
    freed = {name: size - cache.nbytes[name] for name, size in before.items()}
    row = 2 * 2 * 2 * 16 * 4 + 2 * 2 + 2 + (0 if apart else 2 * 8)
    assert freed["kv"] + freed["books"] == (475 - 70) * row
    assert cache.nbytes["weight"] * 475 == before["weight"] * 70


def guided() -> QueryBridge:
    return QueryBridge(2, 16, guides=50)


@by_name([case for case in ON_DEVICE if case.name != "bridge"] + [Case("bridge-guided", guided, guided)])
@pytest.mark.filterwarnings("ignore:.*no queries of the prefill:UserWarning")
def test_a_fixed_cache_holds_what_a_full_one_would(case: Case) -> None:
    """From the first row on, whatever is stored: of the selector, what a step reads of the rows."""
    queries, keys, values = heads(2, 2, 2, 1016, 16)
    fixed = KVCache(case.make(), sink=4, window=16, seal=32, capacity=1000, fixed=True)
    fixed.append(*(part[..., :300, :] for part in (keys, values, queries)))
    plain = KVCache(case.make(), sink=4, window=16, seal=32)
    plain.append(keys, values, queries)
    for cache in (fixed, plain):
        cache.seal()
        decode(queries[:, :, :, 300].contiguous(), cache, 64)
    assert fixed.keys.nbytes + fixed.values.nbytes == 2 * 2 * 2 * 1000 * 16 * 4
    assert plain.stored.sealed_keys.shape[2] == 996 // plain.selector.unit * plain.selector.unit
    unread = {"kept", "valid"} if isinstance(fixed.selector, QueryBridge) else {"kept"}  # the last choice is no row
    full = dict(plain.selector.buffers())
    for name, state in fixed.selector.buffers():
        if name == "missed_rows" and state.allocated:  # a share of 996 rows, of which 992 are sealed
            assert state.full.shape[2] - full[name].rows in (0, 1)
        elif name not in unread:
            segments = (996 // 32).bit_length() if name.endswith("edges") else 1  # at most, where rows come in 32s
            assert (name, state.full.nbytes if state.allocated else 0) == (name, full[name].nbytes * segments)


@pytest.mark.parametrize("check", [True, False])
def test_storage_that_is_replaced_is_let_go(check: bool) -> None:
    """By what looks storage up once for many tokens and steps: where it grows, and with `reset`."""
    keys, values = torch.randn(2, 1, 2, 400, 64)
    cache = KVCache("quest", check=check)
    for end in ("growth", "reset"):
        cache.append(keys, values)
        for _ in range(2):
            decode(torch.randn(1, 2, 4, 64), cache, 64)
            cache.append(keys[:, :, :1], values[:, :, :1])
        before = weakref.ref(cache.stored.keys.storage)
        if end == "growth":
            cache.append(torch.cat([keys, keys], 2), torch.cat([values, values], 2))
        else:
            cache.reset()
        assert before() is None, end
