"""Rows of 8 and 4 bits: how far they are off, the cache that keeps them, and attention over them."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES, Case, attention, heads, missing
from torch import Tensor

from sparseattn import CodedRows, KVCache, Selection, attend, attend_coded, decode
from sparseattn.kernels import coded

B, H, G, D = 2, 2, 3, 32


def rows_of(bits: int, group: int = 16, size: int = D, rows: int = 96, dtype: torch.dtype = torch.float32) -> CodedRows:
    _, keys, values = heads(B, H, G, rows, size, dtype)
    return coded.encode(keys, values, bits, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "size"), [(8, 80), (4, 80), (4, 33)])
def test_a_number_is_half_a_step_off_at_most(bits: int, size: int, dtype: torch.dtype) -> None:
    """Of outlier channels and of channels far from 0 too; and a group's levels are bounds of its keys."""
    _, keys, values = heads(B, H, G, 64, size)
    keys[..., 3] *= 100
    keys[..., 5] += 30
    keys[..., 7] = 2  # one number: a step of 0
    keys, values = keys.to(dtype), values.to(dtype)
    made = coded.encode(keys, values, bits, 16)
    assert made.keys.shape == (B, H, 64, math.ceil(size * bits / 8))
    read = made.decoded()
    low, step = made.key_levels.float().unbind(3)
    grouped = keys.float().unflatten(2, (-1, 16))
    assert bool((low[:, :, :, None] <= grouped).all())
    assert bool((grouped <= (low + step * (2**bits - 1)).mul(1 + 1e-6)[:, :, :, None]).all())
    of_values = made.value_levels.float()[..., 1, :].repeat_interleave(32, -1)[..., :size]
    steps = step.repeat_interleave(16, 2), of_values
    for mine, theirs, most in zip(read, (keys, values), steps, strict=True):
        assert bool(((mine - theirs.float()).abs() <= most / 2 * (1 + 1e-4) + 1e-6).all())
    reach = grouped.amax(3) - grouped.amin(3)
    assert bool((step <= 1.02 * reach / (2**bits - 1) + 0.02 * grouped.abs().amax(3) / (2**bits - 1) + 1e-6).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_in_parts_is_rounding_at_once(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(bits)
    monkeypatch.setattr(coded, "CHUNK", 1)
    parts = rows_of(bits)
    for name in ("keys", "key_levels", "values", "value_levels"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    for one, other in zip(whole.decoded(), parts.decoded(), strict=True):
        assert torch.equal(one, other)


def selections(rows: int) -> dict[str, Selection]:
    draw = torch.Generator().manual_seed(1)
    pages = torch.stack([torch.randperm(rows // 16, generator=draw)[:3] for _ in range(B * H)]).view(B, H, 3)
    ids = torch.stack([torch.randperm(rows, generator=draw)[:21] for _ in range(B * H * G)]).view(B, H * G, 21)
    ids[:, 1] = -1  # a head that reads nothing
    start = torch.tensor([3, 40, rows - 2]).int().expand(B, H, 3)
    return {
        "pages": Selection.pages(pages, 16),
        "rows": Selection.tokens(ids, bias=torch.randn(ids.shape, generator=draw)),
        "runs": Selection(start, torch.tensor([5, 32, 9]).int().expand(B, H, 3), 32),  # the last reaches beyond the end
        "none": Selection.none(B, H),
    }


def expected(query: Tensor, rows: CodedRows, selection: Selection) -> tuple[Tensor, Tensor]:
    """What the definition says: attention over the rows read back."""
    wide = query.double()
    keys, values = rows.decoded(torch.float64)
    bias = None if selection.bias is None else selection.bias
    named = Selection(selection.start, selection.length, selection.span, bias=bias)
    return attend(wide, keys, values, named, impl="reference")


@pytest.mark.parametrize("impl", ["torch", "numba"])
@pytest.mark.parametrize(
    ("bits", "size", "name"),
    [
        (8, 32, "pages"),
        (8, 80, "rows"),
        (4, 80, "pages"),
        (4, 33, "rows"),
        (4, 32, "runs"),
        (8, 32, "none"),
    ],
)
def test_attention_is_that_over_the_rows_read_back(bits: int, size: int, name: str, impl: str) -> None:
    queries, _, _ = heads(B, H, G, 1, size, seed=5)
    query, rows = queries[:, :, :, 0], rows_of(bits, size=size)
    selection = selections(96)[name]
    out, lse = attend_coded(query, rows, selection, impl=impl)
    right, right_lse = expected(query, rows, selection)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


def filled(cache: KVCache, queries: Tensor, keys: Tensor, values: Tensor, prefill: int, budget: int | None) -> Tensor:
    """Outputs `[T,B,H,G,D]` of the tokens behind a prefill."""
    cache.append(keys[:, :, :prefill], values[:, :, :prefill], queries[:, :, :, :prefill])
    outs = []
    for t in range(prefill, keys.shape[2]):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        outs.append(decode(queries[:, :, :, t], cache, budget))
    return torch.stack(outs)


def refused(case: Case) -> bool:
    selector = case.make()
    return selector.reads_stored or selector.observes


@pytest.mark.parametrize("case", [case for case in CASES if missing(case) is None], ids=lambda case: case.name)
def test_a_cache_of_few_bits_reads_what_it_stores_or_refuses(case: Case) -> None:
    """Against attention over the rows named as they were read back; seals, moved rows and tails included."""
    if refused(case):
        with pytest.raises(ValueError, match=r"leave bits out"):
            KVCache(case.make(), bits=4, seal=64)
        return
    queries, keys, values = attention(B, H, G, 230, D)
    cache = KVCache(case.make(), sink=4, window=8, seal=64, bits=8, group=16)
    cache.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150])
    for t in range(150, 230):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        query = queries[:, :, :, t]
        out = decode(query, cache, 40)
        if t % 20:
            continue
        assert cache.latest is not None
        assert cache.selector.stored is None
        parts = [attend(query, *cache.everything()[:2], cache.latest, cache.all_bounds, impl="reference")]
        if (tail := cache.latest_tail) is not None:
            parts.append(attend(query, tail.keys, tail.values, tail.selection, impl="reference"))
        outs, lses = map(torch.stack, zip(*parts, strict=True))
        right = (outs * (lses - lses.logsumexp(0)).exp()[..., None]).sum(0)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    assert int(cache.sealed[0]) > 150
