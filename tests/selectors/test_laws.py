"""The laws of the design, over every selector of `cases.py`.

The expected output is computed apart from the cache: a plain list of every token's key and value, and the original
token numbers that each query may have read.
"""

from __future__ import annotations

import pytest
import torch

from sparseattn import KVCache, Selection, attend, decode, merge
from sparseattn.cache.all_rows import everything
from sparseattn.core.context import LayerContext
from sparseattn.kernels.attend import reference as attend_reference
from sparseattn.selectors.abilities import Evicts
from tests.cases import CASES, Case, attention, by_case, full, missing, together

EVICTING = [case for case in CASES if missing(case) is None and case.make().find(Evicts)]
APART = {"joint": None, "apart": "cpu"}  # every law holds with sealed rows in a storage of their own too
BY_NAME = by_case(CASES, apart=APART)
ZONES = {"-".join(map(str, one)): one for one in [(4, 8, 32), (0, 1, 32), (1, 0, 32), (3, 40, 64), (130, 5, 32)]}
LENGTHS = {"even": (100, 100), "ragged": (100, 3)}
B, H, G, D = 2, 2, 3, 32


pytestmark = pytest.mark.usefixtures("poisoned")


EVERY = 3  # tokens from choice to choice where a law need not see them all; the law of dropped tokens sees them all


def replay(cache: KVCache, queries, keys, values, prefill: int, budget, chunk: int | None = None):
    """Yields (t, query, selection) for every `EVERY`th token from `prefill` on."""
    chunk = chunk or prefill
    for start in range(0, prefill, chunk):
        part = slice(start, min(start + chunk, prefill))
        cache.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
    for t in range(prefill, keys.shape[2]):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1], queries[:, :, :, t : t + 1])
        if (t - prefill) % EVERY == 0:
            query = queries[:, :, :, t]
            yield t, query, cache.select(query, budget)


def over(cache: KVCache, query, selection: Selection, impl: str | None = None) -> torch.Tensor:
    keys, values, bounds = together(cache)
    parts = [attend(query, keys, values, selection, bounds, impl=impl)]
    if (tail := cache.search.tail(query, selection)) is not None:
        parts.append(attend(query, tail.keys, tail.values, tail.selection, impl=impl))
    return merge(*map(torch.stack, zip(*parts, strict=True)))[0]


def original(cache: KVCache, values) -> torch.Tensor:
    """`[B,H,N]`: which token each stored row is, found by its value (all differ; sink keys do not); -1 for padding."""
    same = (together(cache)[1][:, :, :, None, :4] == values[:, :, None, :, :4]).all(-1)  # [B,H,N,T]
    return torch.where(same.any(-1), same.int().argmax(-1), -1)


def check(cache: KVCache, query, selection: Selection, keys, values, t: int, budget: int | None) -> None:
    """Selection well formed, and the output equal to float64 attention over exactly the tokens named."""
    stored_keys, _, bounds = together(cache)
    zone = int(bounds.sealed[0]) - cache.sink
    ids = selection.rows  # [B,Hs,R]
    assert bool((ids < zone).all()), "a selection stays in the sealed zone"
    used = [set(row[row >= 0].tolist()) for row in ids.flatten(0, 1)]
    assert [len(rows) for rows in used] == selection.attended.flatten().tolist(), "spans of one head overlap"
    assert bool((selection.length <= selection.span).all())
    if budget is not None:
        assert bool((selection.attended <= budget).all())

    reads = attend_reference.named(selection, bounds, H, stored_keys.shape[2]).expand(-1, -1, G, -1)  # [B,H,G,N]
    token = original(cache, values[:, :, : t + 1])  # [B,H,N]
    assert not bool((reads & (token < 0)[:, :, None]).any()), "a row of padding is read"
    at = torch.where(reads, token[:, :, None].expand_as(reads), t + 1)
    named = torch.zeros(B, H, G, t + 2, dtype=torch.bool).scatter_(3, at, True)[..., : t + 1]
    bias = torch.zeros(B, selection.start.shape[1], stored_keys.shape[2])
    bias[..., cache.sink : cache.sink + zone] = selection.row_bias(zone)
    bias = bias.unflatten(1, (H, -1)).expand(-1, -1, G, -1)
    bias = torch.zeros(B, H, G, t + 2).scatter_(3, at, bias)[..., : t + 1]
    assert bool((named.sum(-1) == reads.sum(-1)).all()), "a token is read twice"
    recent = slice(max(t + 1 - cache.window, 0), t + 1)
    assert bool(named[..., : cache.sink].all()), "the sink is read"
    assert bool(named[..., recent].all()), "the window is read"

    logits = query.double() @ keys[:, :, : t + 1].double().mT / D**0.5
    logits = (logits + bias.double()).masked_fill(~named, -torch.inf)
    held = values[:, :, : t + 1].double()
    if (tail := cache.search.tail(query, selection)) is not None:
        own = tail.selection.mask(tail.keys.shape[2]).unflatten(1, (H, -1)).expand(-1, -1, G, -1)
        more = query.double() @ tail.keys.double().mT / D**0.5
        more = more + tail.selection.row_bias(tail.keys.shape[2]).unflatten(1, (H, -1)).double()
        logits = torch.cat([logits, more.masked_fill(~own, -torch.inf)], -1)
        held = torch.cat([held, tail.values.double()], 2)
    weights = torch.softmax(logits, -1)
    for impl in ("gather", "reference", None):
        out = over(cache, query, selection, impl)
        torch.testing.assert_close(out.double(), weights @ held, rtol=1e-5, atol=1e-5)


@by_case(CASES, zones=ZONES, apart=APART)
def test_output_is_attention_over_exactly_the_rows_named(
    case: Case, zones: tuple[int, int, int], apart: str | None
) -> None:
    sink, window, seal = zones
    queries, keys, values = attention(B, H, G, 200, D)
    cache = KVCache(case.make(), sink=sink, window=window, seal=seal, sealed_device=apart)
    for number, (t, query, selection) in enumerate(replay(cache, queries, keys, values, 120, 33)):
        if number < 2 or number % 4 == 0:
            check(cache, query, selection, keys, values, t, 33)
    assert int(cache.sealed[0]) > 0


@BY_NAME
def test_exhaustive_and_unlimited_is_full_attention(case: Case, apart: str | None) -> None:
    if case.exhaustive is None:
        pytest.skip(case.reason)
    queries, keys, values = attention(B, H, G, 200, D)
    cache = KVCache(case.exhaustive(), sink=2, window=5, seal=32, sealed_device=apart)
    for t, query, selection in replay(cache, queries, keys, values, 150, None):
        assert int(selection.attended.min()) == int(cache.sealed[0]), "every sealed row is selected"
        out = over(cache, query, selection)
        torch.testing.assert_close(
            out.double(), full(query, keys[:, :, : t + 1], values[:, :, : t + 1]), rtol=1e-5, atol=1e-5
        )


@BY_NAME
def test_one_shot_and_chunked_prefill_build_the_same_index(case: Case, apart: str | None) -> None:
    queries, keys, values = attention(B, H, G, 180, D)
    outs = []
    for chunk in (160, 37, 1):
        cache = KVCache(case.make(), sink=4, window=8, seal=32, sealed_device=apart)
        steps = replay(cache, queries, keys, values, 160, 40, chunk)
        outs.append(torch.stack([over(cache, q, s) for _, q, s in steps]))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@by_case(CASES, budget={"40": 40, "all": None}, side={"left": "left", "right": "right"}, apart=APART)
def test_a_padded_batch_equals_the_unpadded_sequences(
    case: Case, budget: int | None, side: str, apart: str | None
) -> None:
    """Exactly, at every step looked at, for token-level selectors that seal at every row and for exhaustive budgets. A
    batch seals together, so the last rows of a page may be sealed a few steps earlier than alone: pages agree at
    first."""
    if budget is None and case.exhaustive is None:
        pytest.skip(case.reason)
    make = case.make if budget is not None or case.exhaustive is None else case.exhaustive
    unit = make().unit
    seal = 32 if budget is None else unit
    exact = unit == 1 or budget is None
    lengths, prefill, steps = (100, 67, 3), 100, 34 if exact else 1
    queries, keys, values = attention(3, H, G, prefill + steps, D)
    batch = KVCache(make(), sink=4, window=8, seal=seal, sealed_device=apart)
    first = [prefill - n if side == "left" else 0 for n in lengths]
    at = torch.full((3, prefill), -1)
    for b, n in enumerate(lengths):
        at[b, first[b] : first[b] + n] = torch.arange(n)
    batch.append(keys[:, :, :prefill], values[:, :, :prefill], queries[:, :, :, :prefill], at)
    got = {}
    for step, t in enumerate(range(prefill, prefill + steps)):
        one = slice(t, t + 1)
        batch.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        if step == 0:
            cost = batch.select(queries[:, :, :, t], budget)
        if step % EVERY == 0:
            got[step] = decode(queries[:, :, :, t], batch, budget)
    for b, n in enumerate(lengths):
        alone = KVCache(make(), sink=4, window=8, seal=seal, sealed_device=apart)
        mine = slice(b, b + 1)
        rows = slice(first[b], first[b] + n)
        alone.append(keys[mine, :, rows], values[mine, :, rows], queries[mine, :, :, rows])
        for step, t in enumerate(range(prefill, prefill + steps)):
            one = slice(t, t + 1)
            alone.append(keys[mine, :, one], values[mine, :, one], queries[mine, :, :, one])
            if step == 0:
                own = alone.select(queries[mine, :, :, t], budget)
                for name in ("scanned", "scan_bytes"):
                    batched, single = getattr(cost, name), getattr(own, name)
                    if batched is not None and single is not None:
                        assert torch.equal(batched[mine].flatten()[:1], single.flatten()[:1]), name
            if step in got:
                expected = decode(queries[mine, :, :, t], alone, budget)
                torch.testing.assert_close(got[step][mine], expected, rtol=1e-4, atol=1e-5)


@BY_NAME
def test_reorder_clone_and_reset(case: Case, apart: str | None) -> None:
    queries, keys, values = attention(B, H, G, 180, D)
    cache = KVCache(case.make(), sink=4, window=8, seal=32, sealed_device=apart)
    cache.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150])
    decode(queries[:, :, :, 149], cache, 40)
    twin = cache.clone()
    beams = torch.tensor([1, 1, 0])
    cache.reorder(beams)
    of_beams = [x[beams] for x in (keys, values, queries)]
    for t in range(150, 180):
        one = slice(t, t + 1)
        twin.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        cache.append(*(x[..., one, :] for x in of_beams))
        if t % EVERY == 0:
            expected = decode(queries[:, :, :, t], twin, 40)
            torch.testing.assert_close(decode(of_beams[2][:, :, :, t], cache, 40), expected[beams])
    label = repr(cache.selector)
    cache.reset()
    assert cache.batch == 0
    assert repr(cache.selector) == label
    again = KVCache(case.make(), sink=4, window=8, seal=32, sealed_device=apart)
    for c in (cache, again):
        c.append(keys[:1, :, :150], values[:1, :, :150], queries[:1, :, :, :150])
    torch.testing.assert_close(decode(queries[:1, :, :, 149], cache, 40), decode(queries[:1, :, :, 149], again, 40))


@BY_NAME
def test_for_layer_is_fresh_and_keeps_its_label(case: Case, apart: str | None) -> None:
    queries, keys, values = attention(B, H, G, 100, D)
    selector = case.make()
    cache = KVCache(selector, sink=0, window=0, seal=32, sealed_device=apart)
    cache.append(keys, values, queries)
    decode(queries[:, :, :, 99], cache, 40)
    fresh = selector.for_layer(LayerContext(3, rope=selector.layer_context.rope))
    assert fresh.layer == 3
    assert repr(fresh) == repr(selector)
    other = KVCache(fresh, sink=0, window=0, seal=32, sealed_device=apart)
    other.append(keys[:1, :, :80], values[:1, :, :80], queries[:1, :, :, :80])
    assert bool((other.select(queries[:1, :, :, 79], 40).rows < 80).all())


@BY_NAME
def test_crop_then_other_tokens_equals_never_having_seen_them(case: Case, apart: str | None) -> None:
    queries, keys, values = attention(B, H, G, 140, D)
    cache, plain = (KVCache(case.make(), sink=4, window=8, seal=32, rollback=6, sealed_device=apart) for _ in range(2))
    for c in (cache, plain):
        c.append(keys[:, :, :100], values[:, :, :100], queries[:, :, :, :100])
    draft = torch.randn(B, H, 6, D)
    for t in range(100, 140):
        if t % 7 == 0:
            cache.append(draft, draft, draft[:, :, None].expand(-1, -1, G, -1, -1))
            cache.crop(6)
        one = slice(t, t + 1)
        for c in (cache, plain):
            c.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        query = queries[:, :, :, t]
        torch.testing.assert_close(decode(query, cache, 40), decode(query, plain, 40))
    with pytest.raises(ValueError, match="rollback="):
        cache.crop(100)


@by_case(CASES, lengths=LENGTHS, apart=APART)
def test_everything_is_every_real_row_once(case: Case, lengths: tuple[int, ...], apart: str | None) -> None:
    queries, keys, values = attention(B, H, G, 140, D)
    at = torch.stack([torch.arange(100) - (100 - n) for n in lengths]).clamp(min=-1)
    evicts = case.make().find(Evicts)  # what is dropped is not there
    make, budget = (case.exhaustive, None) if evicts and case.exhaustive else (case.make, 40)
    cache = KVCache(make(), sink=4, window=8, seal=32, sealed_device=apart)
    cache.append(keys[:, :, :100], values[:, :, :100], queries[:, :, :, :100], at)
    for t in range(100, 140):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        if t % 13:
            continue
        for _ in range(2):  # all of them recent, or some sealed since the last check; then sealed
            stored = everything(cache)
            for b, n in enumerate(lengths):
                for h in range(H):
                    mine, real = [x[b, h][stored[2][b, h]] for x in stored[:2]], slice(100 - n, t + 1)
                    at_values, given = mine[1][:, 0].argsort(), values[b, h, real, 0].argsort()
                    assert torch.equal(mine[0][at_values], keys[b, h, real][given])
                    assert torch.equal(mine[1][at_values], values[b, h, real][given])
            cache.select(queries[:, :, :, t], budget)


@by_case(EVICTING, lengths=LENGTHS, apart=APART)
def test_compact_frees_memory_and_changes_nothing_else(case: Case, lengths: tuple[int, ...], apart: str | None) -> None:
    """Beside a cache that frees nothing, through seals, beams and dropped tokens; a cache in which nothing is dropped
    stays as it is."""
    queries, keys, values = attention(B, H, G, 230, D)
    at = torch.stack([torch.arange(150) - (150 - n * 3 // 2) for n in lengths]).clamp(min=-1)
    settings = {"sink": 4, "window": 8, "seal": 32, "rollback": 3, "sealed_device": apart}
    cache, plain = (KVCache(case.make(), **settings) for _ in range(2))
    for one in (cache, plain):
        one.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150], at)
    assert cache.compact() == 0, "nothing is sealed yet"
    beams, draft = torch.arange(B), torch.randn(B, H, 3, D)
    freed = 0
    for t in range(150, 230):
        token = [x[beams][..., t : t + 1, :] for x in (keys, values, queries)]
        for one in (cache, plain):
            one.append(*token)
        query = token[2][:, :, :, 0]
        torch.testing.assert_close(decode(query, cache, 30), decode(query, plain, 30), rtol=1e-5, atol=1e-5)
        if t in (150, 151, 190, 220):
            before, zone, expected = cache.nbytes, cache.stored.sealed_keys.shape[2], decode(query, cache.clone(), 30)
            more = cache.compact()
            assert more > 0 or t > 150
            freed += more
            assert cache.freed == freed
            assert cache.stored.sealed_keys.shape[2] == zone - more
            assert cache.nbytes["kv"] == before["kv"] - more * 2 * B * H * D * 4
            assert sum(cache.nbytes.values()) <= sum(before.values()) - more * 2 * B * H * D * 4
            torch.testing.assert_close(decode(query, cache.clone(), 30), expected, rtol=1e-5, atol=1e-5)
            for one, other in zip(everything(cache), everything(plain), strict=True):
                assert one.shape[2] == other.shape[2] - freed
            mine, others = (kept[1][kept[2]][:, 0].sort().values for kept in (everything(c) for c in (cache, plain)))
            assert torch.equal(mine, others), "what is dropped is there in neither"
        if t == 170:
            beams = torch.tensor([1, 0])
            for one in (cache, plain):
                one.reorder(beams)
        if t % 20 == 0:
            for one in (cache, plain):
                one.append(draft, draft, draft[:, :, None].expand(-1, -1, G, -1, -1))
                one.crop(3)
    assert case.exhaustive is not None
    whole = KVCache(case.exhaustive(), **settings)
    whole.append(keys, values, queries)
    whole.seal()
    assert whole.compact() == 0


@BY_NAME
def test_selection_has_static_shape(case: Case, apart: str | None) -> None:
    """Shapes depend on the budget and on what is sealed, never on the query."""
    queries, keys, values = attention(B, H, G, 200, D)
    cache = KVCache(case.make(), sink=0, window=4, seal=64, sealed_device=apart)
    cache.append(keys, values, queries)
    shapes = {tuple(cache.select(queries[:, :, :, t], 40).start.shape) for t in range(0, 200, 20)}
    assert len(shapes) == 1
