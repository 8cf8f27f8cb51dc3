"""Attention of many queries by matrix tiles or by pairs, where the processor has them: the same as by rows."""

from __future__ import annotations

import llvmlite.binding
import numba
import pytest
import torch

from sparseattn import Bounds, Selection, attend

pytest.importorskip("numba")
from sparseattn.kernels import numba_pairs, numba_tiles
from sparseattn.kernels.attend import cpu, cpu_many
from sparseattn.kernels.attend.cpu_many import BY_PAIRS, BY_ROWS, BY_TILES

needs_tiles = pytest.mark.skipif(not numba_tiles.tiles(), reason="no matrix tiles of bfloat16 (AMX) on this processor")
needs_pairs = pytest.mark.skipif(not numba_pairs.pairs(), reason="no AVX-512 BF16 on this processor")
by_each = pytest.mark.parametrize(
    "products",
    [pytest.param(BY_TILES, marks=needs_tiles, id="tiles"), pytest.param(BY_PAIRS, marks=needs_pairs, id="pairs")],
)


def test_code_for_other_processors_has_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx2,+amx-tile,-amx-bf16")
    assert not numba_tiles.compiled_for_tiles()
    assert not numba_tiles.tiles.__wrapped__()
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx512bw,+amx-tile,+amx-bf16")
    assert numba_tiles.compiled_for_tiles()


def test_code_for_other_processors_has_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx512bf16,-avx512vl")
    assert not numba_pairs.compiled_for_pairs()
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx512bf16,+avx512vl")
    assert numba_pairs.compiled_for_pairs()
    monkeypatch.setattr(llvmlite.binding, "llvm_version_info", (15, 0, 7))
    assert not numba_pairs.compiled_for_pairs()


def test_products_are_as_dtype_size_and_queries_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    products_for = cpu_many.products_for.__wrapped__
    monkeypatch.setattr(cpu_many, "pairs", lambda: True)
    for tiles, by in ((True, BY_TILES), (False, BY_PAIRS)):
        monkeypatch.setattr(cpu_many, "tiles", lambda tiles=tiles: tiles)
        assert products_for(5, torch.bfloat16, 128) == by
        assert products_for(3, torch.bfloat16, 64) == by
        assert products_for(4, torch.bfloat16, 128) == BY_ROWS
        assert products_for(2, torch.bfloat16, 64) == BY_ROWS
        assert products_for(16, torch.float32, 128) == BY_ROWS
        assert products_for(16, torch.bfloat16, 96) == BY_ROWS
    monkeypatch.setattr(cpu_many, "pairs", lambda: False)
    assert products_for(16, torch.bfloat16, 128) == BY_ROWS


@by_each
@pytest.mark.parametrize(("size", "share"), [(64, 3), (128, 12), (256, 16), (64, 35)])
@pytest.mark.parametrize("kind", ["run", "pages", "rows", "blocks"])
def test_found_as_by_rows(products: int, size: int, share: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that lie together, pages, single rows with a bias, and rows of a paged store."""
    torch.manual_seed(size + share)
    rows, table = 1500, None
    keys, values = torch.randn(2, 2, 3, rows, size).to(torch.bfloat16)
    query = torch.randn(2, 3, share, size).to(torch.bfloat16)
    bounds = Bounds.of(2, rows, sink=7, sealed=rows - 33)
    if kind == "run":
        start = torch.zeros(2, 3, 1, dtype=torch.int32)
        chosen = Selection(start, torch.full_like(start, rows), 2048)
    elif kind == "rows":
        start = torch.rand(2, 3, rows - 40).argsort(-1)[:, :, :1301].int()
        chosen = Selection(start, torch.ones_like(start), 1, bias=torch.randn(2, 3, 1301))
    else:
        chosen = Selection.pages(torch.rand(2, 3, 80).argsort(-1)[:, :, :37], 16)
    if kind == "blocks":
        keys, values = (part.reshape(2, 3, 15, 100, size).transpose(1, 2).flatten(0, 1) for part in (keys, values))
        table = torch.arange(30, dtype=torch.int32).view(2, 15)
    found = []
    for used in (products, BY_ROWS):
        monkeypatch.setattr(cpu, "products_for", lambda *given, used=used: used)
        found.append(attend(query, keys, values, chosen, bounds, impl="numba", block_table=table))
    wide = (part.float() for part in (query, keys, values))
    expected = attend(*wide, chosen, bounds, impl="reference", block_table=table)
    for out, lse in found:
        torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.float(), expected[0], rtol=2**-7, atol=2e-4)
    off = [float((out.float() - expected[0]).abs().mean()) for out, _ in found]
    assert off[0] < 1.05 * off[1]  # what is left is the rounding of the output


@by_each
def test_rows_that_are_no_numbers_show_and_those_at_infinity_weigh_nothing(
    products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "products_for", lambda *given: products)
    torch.manual_seed(0)
    query, keys = torch.ones(1, 1, 8, 64), torch.randn(1, 1, 200, 64)
    values, start = torch.randn(1, 1, 200, 64), torch.zeros(1, 1, 1, dtype=torch.int32)
    chosen = Selection(start, torch.full_like(start, 200), 256)
    keys[0, 0, 5] = -torch.inf
    given = [part.to(torch.bfloat16) for part in (query, keys, values)]
    expected, lse = attend(*(part.float() for part in given), chosen, impl="reference")
    out, own = attend(*given, chosen, impl="numba")
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2e-4)
    torch.testing.assert_close(own, lse, rtol=1e-5, atol=1e-5)
    given[1][0, 0, 150, 3] = torch.nan
    assert attend(*given, chosen, impl="numba")[0].isnan().all()
    given[1][:] = -torch.inf
    out, lse = attend(*given, chosen, impl="numba")
    assert lse.isneginf().all()
    assert (out == 0).all()
