"""Rows of 8 and 4 bits: how far they are off, the cache that keeps them, and attention over them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn import CodedRows, KVCache, Rows, Selection, Selector, Window, attend, attend_coded, decode, evaluate
from sparseattn.cache.all_rows import all_bounds, everything
from sparseattn.cli.eval_methods import methods
from sparseattn.cli.values import row_codecs
from sparseattn.core.context import StepContext
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.kernels.attend_quantized import reference as attend_quantized_reference
from sparseattn.selectors.abilities import Observes, ReadsKeys
from sparseattn.traces.synthetic import synthetic
from tests.cases import CASES, Case, attention, heads, missing

B, H, G, D = 2, 2, 3, 32


def rows_of(bits: int, group: int = 16, size: int = D, rows: int = 96, dtype: torch.dtype = torch.float32) -> CodedRows:
    _, keys, values = heads(B, H, G, rows, size, dtype)
    return attend_quantized_reference.encode(keys, values, bits, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "size"), [(8, 80), (4, 80), (4, 33), (2, 80), (2, 33)])
def test_a_number_is_half_a_step_off_at_most(bits: int, size: int, dtype: torch.dtype) -> None:
    """Of outlier channels and of channels far from 0 too; and a group's levels are bounds of its keys."""
    _, keys, values = heads(B, H, G, 64, size)
    keys[..., 3] *= 100
    keys[..., 5] += 30
    keys[..., 7] = 2  # one number: a step of 0
    keys, values = keys.to(dtype), values.to(dtype)
    made = attend_quantized_reference.encode(keys, values, bits, 16)
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


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_in_parts_is_rounding_at_once(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(bits)
    monkeypatch.setattr(attend_quantized_reference, "CHUNK", 1)
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
        (2, 80, "rows"),
        (2, 33, "runs"),
        (2, 3, "pages"),
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


def refused(case: Case) -> bool:
    selector = case.make()
    return bool(selector.find(ReadsKeys) or selector.find(Observes))


# In the fast run methods of pages, of single rows, with an order and with a tail, and all that are refused.
FAST = ("quest", "lowbit", "saap", "sparq-mean")
EVERY = [
    pytest.param(case, id=case.name, marks=[] if case.name in FAST or refused(case) else [pytest.mark.slow])
    for case in CASES
    if missing(case) is None
]


@pytest.mark.parametrize("case", EVERY)
def test_a_cache_of_few_bits_reads_what_it_stores_or_refuses(case: Case) -> None:
    """Against attention over the rows named as they were read back; seals, moved rows and tails included."""
    if refused(case):
        with pytest.raises(ValueError, match=r"leave rows out"):
            KVCache(case.make(), rows="kivi:bits=4", seal=64)
        return
    queries, keys, values = attention(B, H, G, 230, D)
    cache = KVCache(case.make(), sink=4, window=8, seal=64, rows="kivi:bits=8,group=16")
    cache.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150])
    for t in range(150, 230):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        query = queries[:, :, :, t]
        out = decode(query, cache, 40)
        if t % 20:
            continue
        assert cache.search.latest is not None
        assert all(part.stored is None for part in cache.selector.find(ReadsKeys))
        parts = [attend(query, *everything(cache)[:2], cache.search.latest, all_bounds(cache), impl="reference")]
        if (tail := cache.search.latest_tail) is not None:
            parts.append(attend(query, tail.keys, tail.values, tail.selection, impl="reference"))
        outs, lses = map(torch.stack, zip(*parts, strict=True))
        right = (outs * (lses - lses.logsumexp(0)).exp()[..., None]).sum(0)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    assert int(cache.sealed[0]) > 150


class Turned(Selector):
    """Stores all rows anew at every seal, the newest first, and reads the first ones."""

    span = 16

    def __init__(self) -> None:
        self.shown = RowBuffer(1)  # [B,N]

    def append(self, rows: Rows) -> Tensor:
        self.shown.append(rows.positions)
        return torch.arange(self.shown.rows).flip(0).expand(*rows.keys.shape[:2], -1).contiguous()

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        pages = torch.arange(min(budget, self.shown.rows) // 16).expand(*query.shape[:2], -1)
        return Selection.pages(pages, 16)


def test_rows_that_a_later_seal_moves_are_rounded_once_more() -> None:
    _, keys, values = attention(B, H, G, 128, D)
    caches = [KVCache(Turned(), sink=0, window=0, seal=32, rows="kivi:bits=8", exact=exact) for exact in (False, True)]
    for cache in caches:
        for part in (slice(0, 64), slice(64, 128)):
            cache.append(keys[:, :, part], values[:, :, part])
            cache.seal()
    plain, kept = caches
    assert plain.stored.sealed_codes is not None
    assert kept.stored.sealed_codes is not None
    assert torch.equal(plain.stored.sealed_codes.keys, kept.stored.sealed_codes.keys), (
        "what is kept beside changes no code"
    )
    order = [*range(127, 63, -1), *range(64)]  # the first 64 were turned twice
    assert torch.equal(kept.stored.sealed_keys, keys[:, :, order])
    step = plain.stored.sealed_codes.key_levels[:, :, :, 1].float().repeat_interleave(32, 2)
    off = (plain.stored.sealed_keys - keys[:, :, order]).abs()
    assert bool((off[:, :, :64] <= step[:, :, :64] / 2 * 1.001).all())
    assert bool((off <= step * 1.05).all())
    assert plain.nbytes["kv"] < kept.nbytes["exact"] / 3
    assert "exact" not in plain.nbytes


def test_copies_beams_and_dropped_tokens_are_those_of_a_cache_of_exact_rows() -> None:
    queries, keys, values = attention(B, H, G, 140, D)
    cache = KVCache("quest", sink=4, window=8, seal=32, rollback=3, rows="kivi:bits=4")
    cache.append(keys[:, :, :130], values[:, :, :130])
    first = decode(queries[:, :, :, 129], cache, 32)
    assert cache.stored.sealed_codes is not None
    twin = cache.clone()
    cache.append(keys[:, :, 130:132], values[:, :, 130:132])
    cache.crop(2)
    torch.testing.assert_close(decode(queries[:, :, :, 129], cache, 32), first)
    twin.reorder(torch.tensor([1, 1, 0]))
    swapped = queries[[1, 1, 0], :, :, 129]
    torch.testing.assert_close(decode(swapped, twin, 32), first[[1, 1, 0]])
    apart = KVCache("quest", sink=4, window=8, seal=32, rows="kivi:bits=4", sealed_device="cpu", rollback=3)
    apart.append(keys[:, :, :130], values[:, :, :130])
    torch.testing.assert_close(decode(queries[:, :, :, 129], apart, 32), first)
    cache.reset()
    cache.append(keys[:, :, :130], values[:, :, :130])
    torch.testing.assert_close(decode(queries[:, :, :, 129], cache, 32), first)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rows": "kivi:bits=3"}, "rows are of 2, 4 or 8 bits, got 3"),
        ({"rows": "kivi:bits=8,group=12"}, "group is a power of two rows of keys that share levels, 8 to 1024, got 12"),
        ({"rows": "kivi:bits=8", "fixed": True, "capacity": 4096}, "leave fixed=True out"),
        ({"rows": "kivi:bits=8,group=256", "seal": 128}, "the unit of .* and of groups of 256 rows, 256 rows, got 128"),
    ],
)
def test_what_cannot_be_had_is_refused_before_any_row(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KVCache("quest", **settings)


def test_rows_of_few_bits_are_not_freed() -> None:
    _, keys, values = attention(B, H, G, 128, D)
    cache = KVCache(Window(), rows="kivi:bits=8")
    cache.append(keys, values)
    cache.seal()
    with pytest.raises(ValueError, match="single ones cannot be freed"):
        cache.compact()


def test_a_replay_counts_bytes_of_codes_and_compares_with_rows_as_they_came() -> None:
    """Quest's pages are groups: of 128 rows in 4 groups 4-bit codes, levels of values and of keys are read."""
    trace = synthetic(400, heads=2, group=2, size=32, clusters=8, rope=True)
    found = {
        bits: evaluate(
            trace, "quest:page=32", 128, sink=4, window=60, last=2, seal=32, rows=bits and f"kivi:bits={bits}"
        )
        for bits in (None, 8, 4)
    }
    errors = {bits: one.mean("relative_error") for bits, one in found.items()}
    assert errors[8] == pytest.approx(errors[None], rel=0.1)
    assert errors[4] > errors[None]
    assert found[4].label == "quest:page=32, kivi:bits=4 rows"
    assert found[4].settings["codec"] == "kivi:bits=4"
    assert found[4].mean("recovered") == pytest.approx(found[None].mean("recovered")), "the choice is the same"
    width = trace.dtype.itemsize
    saved = found[None].heads["bytes_share"] - found[4].heads["bytes_share"]
    row, rows = 2 * 32 * width, 399.5  # of the mean of two steps
    coded = 128 * (2 * 16 + 4) + 4 * (4 * 32)
    torch.testing.assert_close(saved, torch.full_like(saved, (128 * row - coded) / (rows * row)), rtol=1e-2, atol=0)


def test_codecs_in_a_command() -> None:
    assert row_codecs(None) == [None]
    assert list(map(str, row_codecs(["exact", "kivi:bits=8", "kivi:bits=8,group=32", "kivi:bits=2"]))) == [
        "None",
        "kivi:bits=8",
        "kivi",
    ]
    with pytest.raises(ValueError, match=r"no row codec is called 'kivy' .did you mean 'kivi'"):
        row_codecs(["kivy"])
    four, eight = row_codecs(["kivi:bits=4", "kivi:bits=8"])
    made = methods(["quest"], "64", [1024], codecs=[None, four])
    assert [one.label for one in made] == ["full", "quest", "quest, kivi:bits=4 rows"]
    with pytest.raises(ValueError, match="leave rows out"):
        methods(["exact"], "64", [1024], codecs=[eight])
    beside = methods(["quest", "exact"], "64", [1024], codecs=[None, eight])
    assert [one.label for one in beside] == ["full", "quest", "quest, kivi:bits=8 rows", "exact"]
