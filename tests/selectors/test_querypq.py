"""QueryPQ beyond the laws: its maps keep products, its codes spend their bits as the queries need, what it costs."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from sparseattn import KVCache, Mass, QueryPQ, Selector, TwoStage, evaluate, make_selector
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import Shape, step_cost
from sparseattn.kernels import codebooks
from sparseattn.kernels.additive_codes import dispatch as additive_codes
from sparseattn.roles.roles import Roles
from sparseattn.selectors.base import vote
from sparseattn.selectors.parameters.query_metric import (
    as_coded,
    balanced,
    codes_of,
    dealt,
    metric_of,
    moves_ahead,
    reached,
    share_kept,
)
from sparseattn.selectors.tokens.query_coded_base import MEANS
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace, TraceLayer
from tests.cases import attention, rows_missed


def test_the_maps_of_keys_and_queries_keep_their_products_and_balance_the_subspaces() -> None:
    draw = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -0.5, 16)
    keys, queries = torch.randn(2, 300, 16, generator=draw) * scale, torch.randn(2, 3, 200, 16, generator=draw) / scale
    keys = keys - keys.mean(1, keepdim=True)
    turn, back = balanced(keys, metric_of(queries), 4)
    turned, asked = keys @ turn.mT, queries @ back[:, None].mT
    torch.testing.assert_close(asked @ turned[:, None].mT, queries @ keys[:, None].mT, rtol=1e-3, atol=1e-3)
    # Over the queries, the mean squared difference of two keys' products is their squared distance.
    apart = ((queries.flatten(1, 2) @ (keys[:, :100] - keys[:, 100:200]).mT) ** 2).mean(1)
    torch.testing.assert_close((turned[:, :100] - turned[:, 100:200]).square().sum(2), apart, rtol=2e-2, atol=0.0)
    products = turned.square().mean(1).log().unflatten(1, (4, 4)).sum(2)  # of variances, a subspace each
    assert float((products.amax(1) - products.amin(1)).max()) < 1.0


def test_directions_are_dealt_so_that_products_of_variances_are_near_each_other() -> None:
    order = dealt(torch.tensor([1.0, 2.0, 4.0, 8.0]), 2)
    assert sorted(map(sorted, order.view(2, 2).tolist())) == [[0, 3], [1, 2]]


def test_keys_that_queries_reach_count_more_and_none_sees_what_comes_behind_it() -> None:
    keys, queries = torch.eye(4)[None], 9 * torch.eye(4)[None, None, [1, 2]]
    weights = reached(queries, torch.tensor([2, 2]), keys, torch.arange(4))
    assert float(weights.mean()) == pytest.approx(1)
    assert weights[0, 3] == 0
    assert int(weights.argmax()) == 2, "of two queries the last quarter is one"


def test_the_metric_of_the_queries_finds_more_where_keys_vary_along_what_no_query_looks_at() -> None:
    trace = synthetic(1024, heads=2, group=2, size=64)
    layer = trace.layer(0)
    keys, query = layer.keys.clone(), layer.query.clone()
    query[..., :32] = 0
    keys[..., :32] *= 4
    hard = Trace.build([replace(layer, query=query, keys=keys)], trace.positions)
    own, plain = (
        evaluate(hard, QueryPQ(8, metric=metric, share=0.5), 64, last=8).mean("recovered") for metric in ("own", "keys")
    )
    assert own > plain + 0.05


def test_codes_of_one_key_keep_it_whole() -> None:
    keys = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    kept = share_kept(keys, keys, codes_of(keys, None, None, 4, 4, 0))
    assert kept.tolist() == [1, 1]


def test_bytes_are_the_codes_of_every_row_and_what_a_query_is_turned_by() -> None:
    query, keys, values = attention(1, 2, 3, 320, 64)
    for spec, row, centroids, known, missed in (
        ("querypq", 4 + 2, 16, True, 7),  # two KV heads share four bytes of a row's position; 2 % of 320 rows
        ("querypq:missed=0.05", 4 + 2, 16, True, 16),
        ("querypq:missed=0", 4 + 2, 16, True, 0),
        ("querypq:bits=8", 4, 256, False, 0),
        ("querypq:subspaces=16,mean=plain", 8, 16, True, 0),
    ):
        method = make_selector(spec)
        method.bind(LayerContext(rope=Rope.of(64) if known else None))
        cache = KVCache(method, sink=0, window=0, seal=32)
        cache.append(keys.bfloat16(), values.bfloat16(), query.bfloat16())
        cache.seal()
        found, means = cache.select(query[:, :, :, -1].bfloat16(), 16), 1 + (row == 6)
        once = 2 * 64 * (centroids + 64) + 4 * 64 * means + missed * (32 + 8)
        assert found.scan_bytes.tolist() == [[320 * row + once] * 2]


def test_sums_of_centroids_are_nearer_to_keys_than_parts_are_at_equal_bytes() -> None:
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 1500, 32, generator=draw) @ torch.randn(32, 32, generator=draw)
    weights = torch.rand(2, 1500, generator=draw)
    off = {}
    for additive in (False, True):
        codes = codes_of(keys, None, weights, 4, 4, 0, additive)
        turned = (keys - codes["centre"][:, None]) @ codes["turn"].mT
        if additive:
            named = additive_codes.names(turned[None], codes["centroids"][None])[0].long()  # [H,M,n]
            read = codes["centroids"].gather(2, named[..., None].expand(-1, -1, -1, 32)).sum(1)
        else:
            read = as_coded(turned, codes["centroids"])
        off[additive] = float(((turned - read).square().sum(2) * weights).mean())
    assert off[True] < 0.9 * off[False]


def test_sums_of_few_keys_and_of_keys_without_weight_are_finite() -> None:
    keys = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    for weights in (None, torch.zeros(1, 5)):
        assert bool(codes_of(keys, None, weights, 3, 4, 0, True)["centroids"].isfinite().all())


def test_a_row_of_sums_ranks_by_the_query_times_the_sum() -> None:
    query, keys, values = attention(1, 2, 3, 320, 64)
    cache = KVCache(QueryPQ(5, share=1.0, additive=True), sink=0, window=0, seal=32)
    cache.append(keys, values, query)
    cache.seal()
    selector, asked = cache.selector, query[:, :, :, -1]
    assert isinstance(selector, QueryPQ)
    books, codes = selector.centroids.data.float(), selector.codes.data
    named = torch.stack([codes & 15, codes >> 4], 3).flatten(2, 3)[:, :, :5].long()  # [B,H,M,N]
    read = books.gather(3, named[..., None].expand(-1, -1, -1, -1, 64)).sum(2) @ selector.turn.data.inverse().mT
    logits = asked @ (read + selector.centre.data[:, :, None]).mT / 8
    torch.testing.assert_close(selector.logits(asked, cache.search.step().valid), logits, rtol=2e-2, atol=5e-2)
    found = cache.select(asked, 16)
    votes = logits.softmax(3).sum(2)
    read = votes.gather(2, found.rows.long()).sort(-1).values
    torch.testing.assert_close(read, votes.topk(16).values.sort(-1).values, rtol=2e-2, atol=1e-3)
    assert found.scan_bytes.tolist() == [[320 * 3 + 2 * 64 * (5 * 16 + 64) + 4 * 64] * 2]


def roped(means: float = 3.0, tokens: int = 600) -> Trace:
    """A trace whose keys have a large mean before RoPE, and whose later ones are as the first."""
    draw = torch.Generator().manual_seed(0)
    rope, at = replace(Rope.of(32), interleaved=True), torch.arange(tokens)
    mean = means * torch.randn(2, 1, 48, generator=draw)
    key = rope.rotate(torch.randn(2, tokens, 48, generator=draw) + mean, at)
    query = rope.rotate(torch.randn(2, 2, tokens, 48, generator=draw) + mean[:, None] / 4, at)
    return Trace.build([TraceLayer(0, query, key, torch.randn(2, tokens, 48, generator=draw), 48**-0.5, rope)], at)


def test_codes_without_the_mean_before_rope_find_more() -> None:
    trace = roped()
    for spec in ("querypq:share=1.0,subspaces=6", "querypq:share=1.0,subspaces=6,additive=True"):
        found = {
            mean: evaluate(trace, make_selector(f"{spec},mean={mean}"), 64, last=300, every=50, seal=32).mean(
                "recovered"
            )
            for mean in MEANS
        }
        assert found["auto"] == found["rope"] > found["plain"] + 0.05
    plain = Trace.build([replace(trace.layer(0), rope=None)], trace.positions)
    each = (evaluate(plain, make_selector(f"querypq:share=1.0,mean={mean}"), 64, last=8) for mean in MEANS)
    assert len({found.mean("recovered") for found in each}) == 1, "a layer without a known RoPE has the plain mean"


def shown(selector: Selector) -> KVCache:
    """A cache of `roped` rows for `selector`, which is told of their RoPE."""
    layer = roped().layer(0)
    cache = KVCache(selector.for_layer(LayerContext(rope=layer.rope)), sink=0, window=0, seal=50)
    cache.append(layer.keys[None], layer.values[None], layer.query[None])
    cache.seal()
    return cache


def test_a_second_stage_has_the_plain_mean_and_what_was_given_stays_as_it_is() -> None:
    given = QueryPQ(6, share=1.0, bits=8)
    made = TwoStage(times=2, second=given)
    assert str(made) == "twostage:times=2,second=[querypq:subspaces=6,bits=8,share=1.0]"
    assert given.turning
    assert given.by_row == ("codes", "at")
    named = make_selector(str(made))
    plain = TwoStage(times=2, second=QueryPQ(6, share=1.0, bits=8, mean="plain"))
    query, found, costs = roped().layer(0).query[None, :, :, -1], [], []
    for one in (plain, made, named, named.clone(), copy.deepcopy(made)):
        cache = shown(one)
        second = cache.selector.inside
        assert isinstance(second, QueryPQ)
        assert (second.turning, second.by_row, hasattr(second, "at")) == (False, ("codes",), False)
        assert second.index_arguments()["mean"] == "plain"
        chosen = cache.select(query, 32)
        found.append((chosen.rows, chosen.scan_bytes))
        costs.append(step_cost(one, Shape(1, 2, 2, 48), 4096, 64))
    assert all(torch.equal(*pair) for others in found[1:] for pair in zip(others, found[0], strict=True))
    assert costs == costs[:1] * 5
    assert shown(given).selector.at.rows == 600, "by itself it has positions"


@pytest.mark.parametrize("fixed", [False, True])
def test_by_default_what_codes_miss_of_some_rows_is_kept_where_it_can_be(fixed: bool) -> None:
    """Of as many rows as the share says, however few a seal has."""
    layer = roped().layer(0)
    for spec, known, kept in (
        ("querypq", True, 12),
        ("querypq:missed=0.1", True, 60),
        ("querypq:page=8,bits=8", True, 12),
        ("querypq:missed=0", True, None),
        ("querypq", False, None),
        ("querypq:mean=plain", True, None),
        ("querypq:additive=True", True, None),
        ("twostage:times=2,pages=[quest:page=8],second=querypq", True, None),
    ):
        method = make_selector(spec).for_layer(LayerContext(rope=layer.rope if known else None))
        cache = KVCache(method, sink=0, window=0, seal=8, fixed=fixed, capacity=600 if fixed else 0)
        for first, last in ((0, 440), *((first, first + 8) for first in range(440, 600, 8))):
            rows = slice(first, last)
            cache.append(layer.keys[None, :, rows], layer.values[None, :, rows], layer.query[None, :, :, rows])
            cache.seal()
        state = {name: part for name, buffer in cache.selector.buffers() for part in buffer.saved().values()}
        found = {name.split(".")[-1]: part.shape for name, part in state.items()}
        rows = found["missed_rows"][2] if "missed_rows" in found else None
        assert (rows, "limit" in found) == (kept, kept is not None), spec
        assert cache.stored.zones.sealed == [600]


def test_a_share_of_none_is_the_same_however_it_is_written() -> None:
    told = [json.dumps(make_selector(f"querypq:missed={text}").index_arguments()) for text in ("0", "0.0", "None")]
    assert told[0] == told[1] == told[2], "without a known RoPE none is kept by default"


def test_a_graph_proposes_for_each_query_head_and_codes_rank_what_a_group_is_proposed() -> None:
    query, chosen = roped().layer(0).query[None, :, :, -1], []
    for spec, budget in (("retrieval", 96), ("twostage:pages=[retrieval],times=4,second=[querypq:share=1.0]", 24)):
        rows = shown(make_selector(spec)).select(query, budget).rows
        chosen.append([set(of_group.flatten().tolist()) - {-1} for of_group in rows[0].view(2, -1)])
    for proposed, ranked in zip(*chosen, strict=True):
        assert len(ranked) == 24
        assert ranked <= proposed


@pytest.mark.parametrize("fixed", [False, True])
def test_the_mean_before_rope_is_in_the_logits_and_its_bytes_are_counted(fixed: bool) -> None:
    layer = roped().layer(0)
    query, keys, values = layer.query[None].bfloat16(), layer.keys[None].bfloat16(), layer.values[None].bfloat16()
    method = QueryPQ(24, share=1.0)
    method.bind(LayerContext(rope=layer.rope))
    cache = KVCache(method, sink=0, window=0, seal=50, fixed=fixed, capacity=700 if fixed else 0)
    for first in (0, 400):  # the last rows are coded with the books of the first
        part = slice(first, first + 400)
        cache.append(keys[:, :, part], values[:, :, part], query[:, :, :, part])
        cache.seal()
    asked = query[:, :, :, -1]
    selector = cache.selector
    assert isinstance(selector, QueryPQ)
    valid = cache.search.step().valid
    logits = selector.logits(asked, valid)[..., :600]
    exact = asked.float() @ keys.float().mT / 48**0.5
    off = (logits - exact).std() / exact.std()
    assert float(off) < 0.25
    found = cache.select(asked, 32)
    weights = logits.softmax(3).sum(2)
    read, best = weights.gather(2, found.rows.long()).sum(2), weights.topk(32).values.sum(2)
    torch.testing.assert_close(read, best, rtol=0.02, atol=0.0)
    per_row = 12 + 2  # codes, and half of a position
    missed = 12 * (24 + 8)
    assert found.scan_bytes.tolist() == [[600 * per_row + missed + 2 * 48 * (16 + 48) + 8 * 48] * 2]


def test_rows_sealed_later_are_coded_with_the_prompts_books_and_change_none() -> None:
    """However far they lie from what the books were learned on: nothing learns them anew."""
    query, keys, values = attention(2, 2, 3, 400, 64)
    keys[:, :, 200:] *= 3
    cache = KVCache(QueryPQ(share=0.5), sink=0, window=0, seal=20)
    cache.append(keys[:, :, :200], values[:, :, :200], query[:, :, :, :200])
    cache.seal()
    selector = cache.selector
    books = {name: getattr(selector, name).data.clone() for name in ("centre", "turn", "back", "centroids", "known")}
    first = selector.codes.data.clone()
    for t in range(200, 400, 25):
        cache.append(keys[:, :, t : t + 25], values[:, :, t : t + 25], query[:, :, :, t : t + 25])
        cache.seal()
    assert all(torch.equal(getattr(selector, name).data, held) for name, held in books.items())
    assert torch.equal(selector.codes.data[..., :200], first)
    turned = (keys - books["centre"][:, :, None]) @ books["turn"].mT
    assert torch.equal(codebooks.paired(codebooks.nearest(turned, books["centroids"])).mT, selector.codes.data)


@pytest.mark.parametrize("group", ["sum", "each"])
def test_keys_of_float16_whose_products_with_queries_pass_its_range_are_found(group: str) -> None:
    """A power of two on keys and on queries is one on every logit, so it changes no choice."""
    query, keys, values = (part.half() for part in attention(1, 2, 3, 400, 64))
    chosen = []
    for times in (1, 2**8):
        cache = KVCache(QueryPQ(share=0.5, reach=0.0, group=group), sink=4, window=8, seal=64, check=True)
        cache.append(keys * times, values, query * times)
        chosen.append(cache.select(query[:, :, :, -1] * times, 16).rows.sort().values)
        assert bool(cache.selector.centroids.data.isfinite().all())
    assert bool((chosen[0] >= 0).all())
    assert torch.equal(*chosen)


def test_a_head_whose_queries_are_zero_has_a_map_that_float16_holds() -> None:
    query, keys, values = (part.half() for part in attention(1, 2, 3, 400, 64))
    query[:, 1] = 0
    cache = KVCache(QueryPQ(share=0.5), sink=4, window=8, seal=64, check=True)
    cache.append(keys, values, query)
    cache.seal()
    assert bool(cache.selector.back.data.isfinite().all())


def test_half_of_the_vectors_get_the_rope_of_positions_to_come() -> None:
    rope, at = replace(Rope.of(8), scaling=1.5), torch.arange(2000)
    plain = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 2000, 8)
    x = rope.rotate(plain, at)
    found = rope.turn(x, moves_ahead(at, 2000, 400, torch.Generator().manual_seed(0)))
    moved = (found != x).any(2).all(0)
    assert 900 < int(moved.sum()) < 1100
    to_come = rope.rotate(plain[:, :1].expand(2, 400, 8), torch.arange(2000, 2400))
    apart = (found[0, moved, None] - to_come[0]).norm(dim=2)
    assert float(apart.min(1).values.max()) < 1e-3, "each is at one of the next 400 positions"
    assert 0.4 < float((apart.argmin(1) < 100).double().mean()) < 0.6, "half are in the first quarter"


def test_rows_that_codes_miss_are_ranked_nearly_by_their_keys() -> None:
    """Those of the prompt, and one that is sealed later and resembles nothing before it."""
    query, keys, values = attention(1, 2, 3, 600, 16)
    rope = Rope.of(16)
    keys[:, :, 590] = 9.0
    selector = QueryPQ(2, share=1.0, missed=0.05).for_layer(LayerContext(0, rope=rope))
    cache = KVCache(selector, sink=0, window=0, seal=20, check=True)
    for first, last in ((0, 500), (500, 600)):
        cache.append(keys[:, :, first:last], values[:, :, first:last], query[:, :, :, first:last])
        cache.seal()
    own = cache.selector
    far = rows_missed(own, 600)
    assert far[:, :, :500].sum(2).tolist() == [[25, 25]]
    assert bool((far[:, :, 500:].sum(2) <= 5).all()), "as large a share of what is sealed later, though codes miss more"
    assert bool(far[:, :, 590].all())
    asked, valid = query[:, :, :, -1], torch.ones(1, 600, dtype=torch.bool)
    found, wanted = own.logits(asked, valid), asked @ keys.mT / 4
    off = (found - wanted).square()
    marked = far[:, :, None].expand_as(off)
    assert float(off[marked].mean().sqrt()) < 0.2 * float(off[~marked].mean().sqrt())
    votes, start = vote(found, "softmax")[0].exp(), cache.select(asked, 30).start[0].long()
    best = votes.topk(30).values.sum(1)
    assert bool((votes.gather(1, start).sum(1) > 0.98 * best).all()), "tables are rounded"


@pytest.mark.parametrize(("mean", "more"), [("plain", 0.2), ("auto", 0.02)])
def test_codes_of_a_long_answer_are_as_good_as_the_prompts_if_the_rope_is_known(mean: str, more: float) -> None:
    """What later keys and queries are without RoPE, the prompt's are too. The mean before RoPE is most of that."""
    draw = torch.Generator().manual_seed(0)
    rope, at = Rope.of(64), torch.arange(1024)
    means = torch.randn(2, 1, 64, generator=draw).repeat_interleave(2, 0)
    key = rope.rotate(torch.randn(2, 1024, 64, generator=draw) + 2 * means[::2], at)
    query = rope.rotate(torch.randn(2, 2, 1024, 64, generator=draw) / 2 + 2 * means.view(2, 2, 1, 64), at)
    layer = TraceLayer(0, query, key, torch.randn(2, 1024, 64, generator=draw), 0.125, rope)
    long = Trace.build([layer], at)
    without = Trace.build([replace(layer, rope=None)], at)
    found = {
        (ahead, known): evaluate(
            trace, QueryPQ(share=1.0, ahead=ahead, mean=mean), 64, last=768, every=96, seal=64
        ).mean("recovered")
        for ahead in (0, 1024)
        for known, trace in ((True, long), (False, without))
    }
    assert found[1024, True] > found[0, True] + more
    assert found[1024, False] == found[0, False]
    assert (found[0, True] > found[0, False] + 0.2) == (mean == "auto")
    assert (found[0, True] == found[0, False]) == (mean == "plain")


def test_pages_weigh_what_their_rows_weigh_by_code() -> None:
    query, keys, values = attention(2, 2, 3, 400, 64)
    caches = []
    for page in (1, 16):
        caches.append(KVCache(QueryPQ(share=1.0, page=page), sink=0, window=0, seal=16))
        caches[-1].append(keys, values, query)
        caches[-1].seal()
    asked, (rows, pages) = query[:, :, :, -1], caches
    assert torch.equal(rows.selector.codes.data, pages.selector.codes.data)
    weights = rows.selector.logits(asked, rows.search.step().valid).softmax(3).sum(2)  # [B,H,N]
    wanted = weights.unflatten(2, (-1, 16)).sum(3).topk(4).indices.sort(2).values * 16
    found = pages.select(asked, 64)
    assert (found.span, found.whole) == (16, True)
    assert torch.equal(found.start.sort(2).values, wanted.int())
    assert bool((pages.select(asked, Mass(0.3, 256)).attended < pages.select(asked, Mass(0.99, 256)).attended).all())
    with pytest.raises(ValueError, match="a page is a power of two rows, or 1, got 12"):
        QueryPQ(page=12)


def test_a_budget_may_be_a_mass_and_a_tail_stands_for_what_codes_leave_out() -> None:
    query, keys, values = attention(1, 2, 3, 404, 64)
    asked, chosen = query[:, :, :, -1], []
    for spec in ("querypq:share=1.0", "tailed:inner=[querypq:share=1.0],rows=32"):
        cache = KVCache(make_selector(spec), sink=4, window=16, seal=32)
        cache.append(keys, values, query)
        cache.seal()
        chosen.append(cache.select(asked, 32))
        if cache.selector.estimates:
            few, many = (cache.select(asked, Mass(share, 256)).attended for share in (0.3, 0.99))
            assert bool((few < many).all())
    assert torch.equal(chosen[0].rows, chosen[1].rows)
    tail = cache.selector.tail(asked, cache.search.step(), chosen[1])
    assert int(tail.selection.attended[0, 0]) == 384 // 32, "no group is read whole"


@pytest.mark.parametrize("first", ["quest:group=sum", "quest:group=each", "lowbit:group=each"])
@pytest.mark.parametrize("group", ["softmax", "each"])
def test_codes_rank_what_another_proposes(first: str, group: str) -> None:
    """As the second of two stages they choose, of the rows proposed, those with the best votes by their logits."""
    query, keys, values = attention(2, 2, 3, 448, 64)
    asked, codes = query[:, :, :, -1], f"querypq:subspaces=16,share=1.0,group={group}"
    caches = []
    for spec in (f"twostage:pages=[{first}],times=4,second=[{codes}]", first, codes):
        caches.append(KVCache(make_selector(spec), sink=0, window=0, seal=64))
        caches[-1].append(keys, values, query)
        caches[-1].seal()
    both, proposing, alone = caches
    assert str(make_selector(str(both.selector))) == str(both.selector)
    found, proposed = both.select(asked, 32), proposing.select(asked, 128)
    logits = alone.selector.logits(asked, alone.search.step().valid)  # [B,H,G,N]
    named = torch.zeros(2, proposed.start.shape[1], 449, dtype=torch.bool)
    rows = proposed.rows.long()
    named = named.scatter_(2, torch.where(rows < 0, 448, rows), True)[..., :-1]
    named = named.unflatten(1, (2, -1))  # [B,H,1 or G,N]
    named = named if group == "each" else named.any(2, keepdim=True)
    votes = vote(logits.masked_fill(~named, -torch.inf), group)
    assert torch.equal(found.rows.sort(-1).values, votes.topk(32).indices.sort(-1).values.int())
    counted = named.expand(-1, -1, 3, -1) if named.shape[2] == 1 else named
    lists = 3 if "each" in (first.partition("=")[2],) and group == "each" else 1
    beside = lists * (2 * 64 * (16 + 64) + 4 * 64)
    own = (counted if lists == 3 else named).sum(3).sum(2)  # [B,H]
    assert torch.equal(found.scan_bytes, proposed.scan_bytes + 8 * own + beside)


def test_what_cannot_be_a_second_stage_is_refused() -> None:
    for spec, message in (
        ("twostage:second=quest", "ranks listed rows by codes: querypq, or by bits, .* got quest"),
        ("twostage:second=[lowbit:bits=4]", "by bits, rows, group and scales a lowbit; got lowbit:bits=4"),
        ("twostage:second=[querypq:page=4]", "a second stage chooses single rows: give querypq:page=4 page=1"),
        (
            "twostage:second=[querypq:mean=rope]",
            "shown keys without their positions: give querypq:mean=rope mean=plain",
        ),
        ("twostage:second=querypq,bits=4", "are of a lowbit: leave them out, or second=querypq"),
    ):
        with pytest.raises(ValueError, match=message):
            make_selector(spec)


@pytest.mark.parametrize("group", ["sum", "each"])
def test_a_stage_a_prune_and_layers_that_follow_choose_by_codes(group: str) -> None:
    """What a first stage of codes proposes is what codes alone would read at so many times the budget."""
    query, keys, values = attention(1, 2, 3, 448, 64)

    def filled(spec: str) -> KVCache:
        cache = KVCache(make_selector(spec), sink=0, window=0, seal=64)
        cache.append(keys, values, query)
        cache.seal()
        return cache

    asked, alone = query[:, :, :, -1], filled(f"querypq:share=1.0,group={group}")
    wide = alone.select(asked, 128).rows
    for spec in (
        f"twostage:pages=[querypq:share=1.0,group={group}],times=4,group={group}",
        f"topp:inner=[querypq:share=1.0,group={group}],p=0.5,propose=128",
    ):
        rows = filled(spec).select(asked, 32).rows
        rows, own = (part.repeat_interleave(6 // part.shape[1], 1) for part in (rows, wide))
        assert bool((rows >= 0).any())
        assert bool(((rows[..., None] == own[:, :, None]).any(-1) | (rows < 0)).all()), spec
    plain = filled(f"freekv:inner=[querypq:share=1.0,group={group}],tau=1.0").select(asked, 32).rows
    assert torch.equal(plain.sort(-1).values, alone.select(asked, 32).rows.sort(-1).values)


def test_it_may_serve_some_heads_of_a_plan() -> None:
    trace = synthetic(600, heads=2, group=2, size=64)
    mixed = evaluate(trace, Roles({0: ["window", "querypq"]}), 40, last=4)
    alone = evaluate(trace, "querypq", 40, last=4)
    assert torch.equal(mixed.heads["recall@10"][:, 2:], alone.heads["recall@10"][:, 2:])


def test_its_step_costs_what_its_codes_take() -> None:
    shape = Shape(1, 8, 4, 128)
    four, eight = (step_cost(make_selector(f"querypq:{more}"), shape, 131_072, 2048) for more in ("bits=4", "bits=8"))
    lowbit = step_cost(make_selector("lowbit"), shape, 131_072, 2048)
    plain = step_cost(make_selector("querypq:mean=plain"), shape, 131_072, 2048)
    assert plain.scan_bytes == 8 * ((131_072 - 68) * 8 + 2 * 128 * (16 + 128) + 4 * 128)
    missed = 2621  # 2 % of the rows
    assert four.scan_bytes == plain.scan_bytes + 8 * ((131_072 - 68) + 4 * 128 + missed * (64 + 8))
    rest, turned = ({launch.kind: launch.flops for launch in cost.launches}["sums"] for cost in (plain, four))
    assert turned == pytest.approx(rest + 2 * 32 * 128 * (131_072 - 68) * 1.02)
    assert eight.scan_bytes - four.scan_bytes == 8 * 2 * 128 * 240
    assert four.scan_bytes < lowbit.scan_bytes / 3
    assert four.rows == 2048 + 68


def test_without_a_sampled_query_keys_ask_and_a_warning_says_so() -> None:
    query, keys, values = attention(1, 1, 1, 320, 64)
    cache = KVCache(QueryPQ(share=0.0), sink=0, window=0)
    cache.append(keys, values, query)
    with pytest.warns(UserWarning, match="no queries of the prefill to learn from in 1 of 1 heads"):
        cache.seal()


def test_what_querypq_refuses() -> None:
    for arguments, message in (
        ({"bits": 6}, "bits is one of 4, 8, got 6"),
        ({"metric": "own queries"}, "metric is one of own, keys, got 'own queries'"),
        ({"subspaces": 256, "mean": "plain"}, "subspaces is 128 or less, as sums of tables have 16 bits, got 256$"),
        (
            {"additive": True, "artefact": "a.safetensors"},
            "codes with additive are the prompt's own: leave out artefact=a",
        ),
        ({"mean": "rope", "subspaces": 120}, "subspaces is 112 or less, or with mean=plain 128, as sums .* got 120$"),
        ({"missed": 0.7}, "missed is a share of rows, 0 to 0.5, or None, got 0.7"),
        ({"missed": "none"}, "missed is a share of rows, 0 to 0.5, or None, got 'none'"),
        ({"missed": 0.1, "additive": True}, "missed=0.1 is for product codes without .* leave out additive"),
        ({"missed": 0.1, "mean": "plain"}, "missed=0.1 is for product codes without .* leave out mean=plain"),
        ({"mean": "before"}, "mean is one of auto, plain, rope, got 'before'"),
        ({"reach": 2.0}, "reach is a power of weights, 0 to 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            QueryPQ(**arguments)
    with pytest.raises(ValueError, match="a divisor of the head size, here of 64, got 5"):
        QueryPQ(5).check_shape(1, 1, 64)
    with pytest.raises(
        ValueError, match="additive codes have 4,096 centroids at most, and 17 codes of 8 bits have 4,352"
    ):
        QueryPQ(17, 8, additive=True).check_shape(1, 1, 64)
    with pytest.raises(ValueError, match="subspaces is 112 or less, or with mean=plain 128, as sums"):
        QueryPQ().check_shape(1, 1, 1024)
    QueryPQ(mean="plain").check_shape(1, 1, 1024)
    TwoStage(second=QueryPQ(128)).check_shape(1, 1, 1024)
    with pytest.raises(ValueError, match=r"subspaces is 128 or less, .* got 256$"):
        QueryPQ(mean="plain").check_shape(1, 1, 2048)
