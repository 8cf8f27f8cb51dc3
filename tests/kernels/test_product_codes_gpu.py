"""The Triton kernels of product codes against the torch specification, on a GPU or else under Triton's interpreter.

What they compile to is in tests/kernels/test_compile.py, with that of the other kernels.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from sparseattn import KVCache, QueryPQ
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.kernels.product_codes import dispatch, reference
from sparseattn.kernels.product_codes.codes import ProductCodes, Tables, Turning, rounded
from tests.cases import attention
from tests.kernels.test_product_codes import check_choices, chosen, made

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
from sparseattn.kernels.product_codes import gpu  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
# batch, heads, group, subspaces, bits, rows: rows that threads load several of at once and others, several tiles,
# groups of an odd number and of none that is a power of two, a byte with one code, most subspaces.
SHAPES = [
    (1, 2, 4, 8, 4, 1040),
    (2, 2, 3, 5, 4, 513),
    (1, 2, 1, 4, 8, 2112),
    (2, 1, 5, 3, 8, 70),
    (1, 1, 17, 2, 4, 96),
    (1, 1, 2, 128, 8, 33),
    (1, 1, 4, 2, 4, 3),
]


def placed(shape: tuple[int, ...]) -> tuple[Tables, ProductCodes]:
    tables, keys = made(*shape)
    tables = Tables(*(part.to(DEVICE) for part in (tables.query, tables.turn, tables.centroids)))
    return tables, ProductCodes(keys.codes.to(DEVICE), keys.bits, keys.valid.to(DEVICE))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_choices_are_the_references(shape: tuple[int, ...]) -> None:
    tables, keys = placed(shape)
    torch.testing.assert_close(*(dispatch.logits(tables.numbers(), keys, impl=impl) for impl in ("triton", "torch")))
    names, step, _ = rounded(tables.numbers())
    expected = reference.nearest(reference.sums(names.float(), keys), step, keys.valid)
    assert torch.equal(gpu.nearest(names, step, keys), expected)
    few = max((count for count in (20, 100) if count < shape[5]), default=2500)
    check_choices(tables, keys, "triton", (few, 2500))  # of 1, two rows may be as near as the last


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_turned_key_is_added_as_in_the_reference(shape: tuple[int, ...]) -> None:
    tables, keys = placed(shape)
    batch, heads, _, size = tables.query.shape
    at = torch.arange(shape[5], dtype=torch.int32, device=DEVICE).expand(batch, -1)
    key = torch.randn(batch, heads, size, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    turning = Turning(Rope.of(size // 2 * 2).to(torch.device(DEVICE)), key, at)
    check_choices(replace(tables, beside=turning), keys, "triton", (20, 2500))


def test_rows_that_are_not_valid_hold_anything_and_a_sequence_may_have_none() -> None:
    tables, keys = placed((2, 2, 4, 8, 4, 64))
    keys.valid[1] = False
    expected = chosen(tables, keys, 8, "torch")
    keys.codes.masked_fill_(~keys.valid[:, None, None], 255)
    found = chosen(tables, keys, 8, "triton")
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    assert bool((found[1] == -1).all())
    assert bool(dispatch.logits(tables.numbers(), keys, impl="triton")[1].isneginf().all())


def test_codes_that_no_list_names_are_not_looked_up() -> None:
    tables, keys = placed((1, 2, 3, 4, 8, 80))
    ids = torch.tensor([[[79, -1, 0, 5], [-1, 2, 2, 40]]], dtype=torch.int32, device=DEVICE)
    found, lse = gpu._sums(gpu._laid(tables.numbers(), keys), keys, ids, True)
    every = reference.logits(tables.numbers(), keys)
    expected = every.gather(3, ids.clamp(min=0).long()[:, :, None].expand_as(found))
    expected = expected.masked_fill((ids < 0)[:, :, None], -torch.inf)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, expected.logsumexp(3, keepdim=True))


def test_what_the_kernels_refuse() -> None:
    tables, keys = placed((1, 1, 1, 129, 8, 16))
    with pytest.raises(ValueError, match="sums of 16 bits hold 128 subspaces, got 129"):
        dispatch.best(tables, keys, 4, impl="triton")
    turned = ProductCodes(keys.codes.mT.contiguous().mT, 8, keys.valid)
    with pytest.raises(ValueError, match="codes whose rows are adjacent: the last stride is 1, got"):
        dispatch.logits(tables.numbers(), turned, impl="triton")


@pytest.mark.parametrize("bits", [4, 8])
def test_querypq_chooses_as_with_the_reference(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 bits with the mean before RoPE, of 8 in a layer whose RoPE is not known."""
    query, keys, values = (x.to(DEVICE) for x in attention(2, 2, 3, 400, 64))
    method = QueryPQ(bits=bits, missed=0.05)
    method.bind(LayerContext(rope=Rope.of(64).to(torch.device(DEVICE)) if bits == 4 else None))
    cache = KVCache(method, sink=4, window=16, seal=32, capacity=500, fixed=True)
    cache.append(keys, values, query)
    cache.seal()
    found = []
    for impl in ("triton", "torch"):
        with monkeypatch.context() as patch:
            chosen = dispatch.CODES.module(impl)
            patch.setattr(dispatch.CODES, "pick", lambda *_, chosen=chosen: chosen)
            found.append(cache.select(query[:, :, :, -1], 48).rows.sort(-1).values)
    assert torch.equal(*found)
