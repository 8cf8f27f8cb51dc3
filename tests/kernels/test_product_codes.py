"""Sums of tables by product codes: compiled code equals the reference, and rounded tables keep their bound."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.kernels.product_codes import cpu_angles, cpu_registers, dispatch, reference
from sparseattn.kernels.product_codes.codes import MORE, ProductCodes, Tables, Turning, rounded
from sparseattn.kernels.product_codes.missed_rows import MissedRows, packed


def chosen(tables: Tables, keys: ProductCodes, count: int, impl: str) -> torch.Tensor:
    """Ids `[B,H,S]`, -1 for none."""
    start, length = dispatch.best(tables, keys, count, impl=impl)
    assert start.dtype == length.dtype == torch.int32
    assert bool(((length == 0) | (length == 1)).all())
    return torch.where(length > 0, start, -1)


# batch, heads, group, subspaces, bits, rows: whole blocks and none, groups that fill no register, an odd subspace
SHAPES = [(1, 2, 4, 8, 4, 1000), (2, 2, 3, 5, 4, 513), (1, 2, 1, 4, 8, 640), (2, 1, 5, 3, 8, 70), (1, 1, 4, 2, 4, 3)]
SHAPES += [(1, 2, 6, 3, 8, 1000)]


def made(batch: int, heads: int, group: int, subspaces: int, bits: int, rows: int) -> tuple[Tables, ProductCodes]:
    draw = torch.Generator().manual_seed(rows)
    stored = torch.randint(0, 256, (batch, heads, -(-subspaces * bits // 8), rows + 9), generator=draw).to(torch.uint8)
    if subspaces * bits % 8:
        stored[:, :, -1] &= 15
    valid = torch.rand(batch, rows, generator=draw) > 0.1
    size = 3 * subspaces
    query, turn = (torch.randn(batch, heads, n, size, generator=draw) for n in (group, size))
    centroids = torch.randn(batch, heads, subspaces, 1 << bits, 3, generator=draw)
    tables = Tables(query / size**0.5, turn.bfloat16(), centroids.bfloat16())
    return tables, ProductCodes(stored[..., :rows], bits, valid)  # a view, as of a row buffer


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_tables_are_within_half_a_step_a_subspace(shape: tuple[int, ...]) -> None:
    tables, keys = made(*shape)
    names, step, least = rounded(tables.numbers())
    read = least[..., None] + step[:, :, None, None] * reference.sums(names.double(), keys)
    off = (read - reference.sums(tables.numbers().double(), keys)).abs().amax((2, 3))
    assert bool((off <= shape[3] * step / 2 * 1.001).all())
    assert bool((off > 0).all()), "a step of 0 would pass too"


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_centroids_of_all_channels_choose_as_the_reference_does(shape: tuple[int, ...]) -> None:
    pytest.importorskip("numba")
    tables, keys = made(*shape)
    batch, heads, _, size = tables.query.shape
    centroids = torch.randn(batch, heads, shape[3], 1 << shape[4], size, generator=torch.Generator().manual_seed(1))
    whole = Tables(tables.query, tables.turn, centroids.bfloat16())
    asked = tables.query @ tables.turn.float().mT
    torch.testing.assert_close(
        whole.numbers(), torch.einsum("bhgd,bhmkd->bhgmk", asked, whole.centroids.float()), rtol=1e-4, atol=1e-4
    )
    check_choices(whole, keys, "numba")


@pytest.mark.parametrize(
    ("shape", "interleaved", "much", "ordered"),
    [
        *((shape, shape[1] == 2, 1.0, "gaps") for shape in SHAPES[:4]),
        *((shape, False, 1.0, kind) for shape in SHAPES[:3] for kind in ("whole", "padded")),
        ((1, 2, 3, 8, 4, 20_000), True, 1.0, "whole"),
        ((1, 2, 3, 8, 4, 5_000), False, 1.0, "far"),
        ((1, 1, 3, 8, 4, 7_000), False, 1.0, "padded"),
        *((shape, False, 1e4, "gaps") for shape in SHAPES[:3]),
    ],
    ids=str,
)
def test_rows_beside_whose_codes_a_turned_key_is_added_are_chosen_as_the_reference_does(
    shape: tuple[int, ...], interleaved: bool, much: float, ordered: str
) -> None:
    """With steps of the tables, and with longer ones where what is added would not fit sums of 16 bits."""
    pytest.importorskip("numba")
    tables, keys = made(*shape)
    batch, heads, _, size = tables.query.shape
    draw = torch.Generator().manual_seed(2)
    at = torch.arange(shape[-1]).expand(batch, -1) + torch.randint(0, 999, (batch, 1), generator=draw)
    rope = Rope.of(size // 2 * 2 if size < 9 else 8)
    key = much * torch.randn(batch, heads, size, generator=draw)
    if ordered == "padded":  # in front, so that row 40 is at position 0
        keys = replace(keys, valid=(torch.arange(shape[-1]) >= 40).expand(batch, -1))
        at = torch.arange(shape[-1]).expand(batch, -1) - 40
    elif ordered != "gaps":
        keys = replace(keys, valid=torch.ones_like(keys.valid))
        at = at + 50_000 * (ordered == "far")
    at = torch.where(keys.valid, at, -1).int()
    assert bool((cpu_angles._begins(at.clamp(min=0)) >= 0).all()) == (ordered in ("whole", "far"))
    turning = Turning(replace(rope, interleaved=interleaved), key, at)
    worked_on = int(cpu_angles.turning_numbers(turning, heads, size)[0][cpu_angles.BLOCKS_AT]) * cpu_angles.WIDE
    assert worked_on <= shape[-1] + 2 * 64 * cpu_angles.WIDE, "none far before the first row"
    # Of rows that weigh nothing beside the best any may be chosen, and the sample's rounding tells which two compete.
    counts = (1,) if much > 1 else (20, 100, 2500)
    check_choices(replace(tables, beside=turning), keys, "numba", counts)
    ids = torch.stack([torch.randperm(shape[-1], generator=draw)[:9] for _ in range(batch * heads)]).int()
    ids = torch.cat([ids, torch.full((len(ids), 2), -1)], 1).view(batch, heads, 11)
    records = packed(ids, much * torch.randn(batch, heads, 11, size, generator=draw))
    missed = MissedRows(records, tables.turn)
    check_choices(replace(tables, beside=replace(turning, missed=missed)), keys, "numba", counts)
    found = []
    larger = torch.cat([records, torch.full_like(records, 77)], 2)[:, :, :11]  # as a row buffer's are
    for one in (records, larger, records.transpose(0, 1).contiguous().transpose(0, 1)):
        own = replace(tables, beside=replace(turning, missed=MissedRows(one, tables.turn)))
        found.append(chosen(own, keys, 20, "numba"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    own = replace(tables, beside=replace(turning, missed=MissedRows(records[..., :8], tables.turn)))
    with pytest.raises(ValueError, match=r"records of rows of .* channels are uint8 of"):
        dispatch.best(own, keys, 20, impl="numba")
    if ordered == "whole":  # as an engine's are
        first = int(at.max()) - shape[-1] + 1
        alike = replace(turning, at=(first + torch.arange(shape[-1])).int().expand(batch, -1))
        told = replace(alike, first=first)
        assert torch.equal(*(dispatch.best(replace(tables, beside=one), keys, 20, "numba")[0] for one in (alike, told)))


@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("slower", [1.0, 8.0, 40.0, 2000.0])
@pytest.mark.parametrize("size", [2, 64])
def test_angles_of_fast_and_of_slow_pairs_alone_make_the_products(
    half: int, slower: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of 32 and of 64 positions, as processors have them."""
    pytest.importorskip("numba")
    monkeypatch.setattr(cpu_angles, "HALF", half)
    monkeypatch.setattr(cpu_angles, "WIDE", 2 * half)
    turns, first, blocks = Rope.of(size).inv_freq / slower, 3 * cpu_angles.TOGETHER, cpu_angles.AT_ONCE
    angles = cpu_angles.angles_of.__wrapped__(tuple(turns.tolist()), first, blocks)
    across, along = torch.randn(2, len(turns), generator=torch.Generator().manual_seed(0))
    u, v = (torch.where(angles.order < 0, 0, part[angles.order.clamp(min=0)]) for part in (across, along))

    def turned(first: int, few: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        own, other = u[first : first + few], v[first : first + few]
        return own * cos + other * sin, other * cos - own * sin

    slowest = angles.slow.shape[1]
    filled, middling = angles.far.shape[1] // 2, angles.wide_far.shape[1] // 2 - slowest
    cos, sin, slow_cos, slow_sin = angles.wide_far.split([middling, middling, slowest, slowest], 1)
    wide = turned(filled + middling, slowest, slow_cos, slow_sin)
    terms = [wide[term % 2] @ angles.slow[term] for term in range(cpu_angles.TERMS)]
    left = torch.cat([*turned(filled, middling, cos, sin), torch.stack(terms, 1)], 1)
    of_blocks = (left @ angles.wide_near.transpose(0, 1).flatten(1)).view(blocks, cpu_angles.TERMS)
    quick = turned(0, filled, *angles.far.chunk(2, 1))
    alike, apart = (
        torch.cat([part[:, : angles.quick], of_terms], 1) @ near
        for part, of_terms, near in zip(quick, of_blocks.chunk(2, 1), angles.near, strict=True)
    )
    found = torch.cat([(alike - apart).flip(1), alike + apart], 1).flatten()
    positions = (torch.arange(len(found)) + first * 2 * half)[:, None] * turns
    wanted = positions.cos() @ across + positions.sin() @ along
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 * float(across.abs().sum() + along.abs().sum()))


def check_choices(tables: Tables, keys: ProductCodes, impl: str, counts: tuple[int, ...] = (1, 20, 100, 2500)) -> None:
    """Rows of equal votes may be others, and a table's number may be rounded the other way by an error of float32."""
    names, step, _ = rounded(tables.numbers(), tables.bounds())
    added, unit = tables.steps_beside(step, tables.bounds()), step[:, :, None, None]
    near = 2 if added is None else 6  # a step more or less of what is added may make another row the last candidate
    sums = unit * (reference.sums(names.float(), keys) + (0 if added is None else added))
    votes = reference.vote_softmax(sums.masked_fill(~keys.valid[:, None, None], -torch.inf))
    for count in counts:
        found, expected = (chosen(tables, keys, count, which) for which in (impl, "torch"))
        assert torch.equal(found.sort(-1).values < 0, expected.sort(-1).values < 0)
        read, wanted = (votes.gather(2, ids.clamp(min=0).long()).masked_fill(ids < 0, 0) for ids in (found, expected))
        torch.testing.assert_close(read.sort(-1).values, wanted.sort(-1).values, rtol=0, atol=near * float(step.max()))
        for ids in found.flatten(0, 1):
            assert len(set(ids[ids >= 0].tolist())) == int((ids >= 0).sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_sums_are_the_references_and_its_choices_are_as_good(shape: tuple[int, ...]) -> None:
    pytest.importorskip("numba")
    tables, keys = made(*shape)
    torch.testing.assert_close(*(dispatch.logits(tables.numbers(), keys, impl=impl) for impl in ("numba", "torch")))
    check_choices(tables, keys, "numba")


@pytest.mark.parametrize("rows", [40, 5000])
def test_candidates_beyond_the_room_of_a_thread_and_of_a_poor_sample_are_found(rows: int) -> None:
    """Every row is as near as any other, or those that the sample shows are far from the best."""
    pytest.importorskip("numba")
    tables, keys = made(1, 1, 2, 4, 4, rows)
    alike = ProductCodes(torch.zeros_like(keys.codes), 4, keys.valid)
    assert len(set(chosen(tables, alike, 7, "numba").flatten().tolist()) - {-1}) == 7
    far, best = torch.zeros_like(keys.codes), reference.sums(tables.numbers(), keys).sum(2)[0, 0].argmax()
    far[0, 0, :, 100:110] = keys.codes[0, 0, :, best : best + 1]
    skewed = ProductCodes(far, 4, torch.ones_like(keys.valid))
    found, expected = (chosen(tables, skewed, 20, impl) for impl in ("numba", "torch"))
    if rows > 110:
        assert set(range(100, 110)) <= set(found.flatten().tolist()) & set(expected.flatten().tolist())


def test_rows_that_are_chosen_are_those_of_the_whole_vote_where_all_are_candidates() -> None:
    tables, keys = made(1, 2, 4, 8, 4, 400)
    names, step, _ = rounded(tables.numbers())
    sums = step[:, :, None, None] * reference.sums(names.float(), keys)
    votes = reference.vote_softmax(sums.masked_fill(~keys.valid[:, None, None], -torch.inf))
    found = chosen(tables, keys, 400 // MORE, "torch")
    assert torch.equal(votes.gather(2, found.long()).sort(-1).values, votes.topk(400 // MORE).values.sort(-1).values)


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_packed_tables(bits: int) -> None:
    """What a processor without shuffles does with 4 bits too; six query heads take two numbers of 64 bits."""
    pytest.importorskip("numba")
    from sparseattn.kernels.numba_entry import entry
    from sparseattn.kernels.product_codes.cpu_choice import add_block, pack

    @entry(cache=True)
    def summed(names, share, words, codes, count, bits, out, valid):  # type: ignore[no-untyped-def]
        pack(names, share, words)
        add_block(codes, 64, count, bits, words.ctypes.data, share, out, 128, valid)

    draw, share, count, entries = np.random.default_rng(0), 6, 3, 1 << bits
    subspaces = count * 8 // bits
    names = draw.integers(0, 256, (share, subspaces * entries), np.uint8)
    codes, valid = draw.integers(0, 256, (count, 64), np.uint8), draw.integers(0, 2, 64, np.uint8)
    words, out = np.empty(2 * subspaces * entries, np.uint64), np.empty((share, 64), np.int16)
    summed(names, share, words, codes.ctypes.data, count, bits, out.ctypes.data, valid.ctypes.data)
    split = codes[:, None] if bits == 8 else np.stack([codes & 15, codes >> 4], 1)
    each = split.reshape(subspaces, 64) + np.arange(subspaces)[:, None] * entries
    expected = np.where(valid, names[:, each].astype(np.int16).sum(1), -1)
    assert np.array_equal(out, expected)


def test_sums_that_would_not_fit_are_refused() -> None:
    pytest.importorskip("numba")
    tables, keys = made(1, 1, 1, 129, 8, 16)
    with pytest.raises(ValueError, match="sums of 16 bits hold 128 subspaces, got 129"):
        dispatch.best(tables, keys, 4, impl="numba")


INNER = (
    "test_rows_beside_whose_codes_a_turned_key_is_added_are_chosen_as_the_reference_does",
    "test_angles_of_fast_and_of_slow_pairs_alone_make_the_products",
)


@pytest.mark.slow
@pytest.mark.skipif("PRODUCT_CODES" in os.environ, reason="this is the inner run")
@pytest.mark.parametrize(
    ("name", "features"),
    [("haswell", "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+popcnt,+lzcnt,+sse4.2"), ("x86-64", "+sse2")],
)
def test_other_instructions_choose_the_same(name: str, features: str) -> None:
    """What a turned key adds once more, compiled for a processor without AVX-512, and for one without AVX2."""
    if cpu_registers.SHUFFLES == 0:
        pytest.skip("needs a processor with AVX2")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider"]
        + [f"{__file__}::{test}" for test in INNER],
        env=os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "PRODUCT_CODES": name},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("size", [2, 6, 16, 24, 128])
def test_what_codes_miss_is_kept_within_half_a_step_of_sixteen(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    ids, missed = torch.tensor([[[4, -1, 0]]]), torch.randn(1, 1, 3, size, generator=draw) * 1e3
    missed[0, 0, 2] = 0
    listed = MissedRows(packed(ids, missed), torch.linalg.qr(torch.randn(1, 1, size, size, generator=draw))[0])
    assert torch.equal(listed.ids, ids.int())
    found, step = listed.missed(), missed.abs().amax(3, keepdim=True) / 7.5
    assert bool(((found - missed).abs() <= 0.5001 * step)[0, 0, [0, 2]].all())
    assert not found[0, 0, 1:].any(), "none, and a row whose code is its key"
    query = torch.randn(1, 1, 2, size, generator=draw)
    wanted = torch.zeros(1, 1, 2, 6)
    wanted[..., 4] = (query @ listed.turn.mT @ found[:, :, 0, :, None])[..., 0]
    torch.testing.assert_close(listed.added(torch.zeros(1, 1, 2, 6), query), wanted)
    torch.testing.assert_close(listed.reach(query), wanted.abs().amax(3))
    none = MissedRows(packed(ids[..., :0], missed[:, :, :0]), listed.turn)
    assert none.ids.shape == (1, 1, 0)
    assert not none.added(torch.zeros(1, 1, 2, 6), query).any()
    assert not none.reach(query).any()
