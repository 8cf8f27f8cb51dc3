"""QueryPQ beyond the laws: its maps keep products, its codes spend their bits as the queries need, what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseattn import KVCache, QueryPQ, evaluate, make_selector
from sparseattn.kernels.product_kmeans import by_torch, product_codebooks
from sparseattn.selectors.parameters.query_metric import balanced, dealt, metric_of, reached
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from tests.cases import attention


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


@pytest.mark.parametrize("learn", [product_codebooks, by_torch], ids=["faiss", "torch"])
def test_keys_count_for_their_weights(learn) -> None:
    if learn is product_codebooks:
        pytest.importorskip("faiss")
    draw = torch.Generator().manual_seed(0)
    keys, weights = torch.randn(1, 400, 4, generator=draw), torch.full((1, 400), 1e-3)
    weights[0, 7] = 1e4
    asked = 4 if learn is product_codebooks else 16  # bits, or centroids
    books = learn(keys, 1, asked, 0, weights)
    assert float((books[0, 0] - keys[0, 7]).norm(dim=1).min()) < 1e-3
    assert float((learn(keys, 1, asked, 0)[0, 0] - keys[0, 7]).norm(dim=1).min()) > 1e-2


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


def test_bytes_are_the_codes_of_every_row_and_what_a_query_is_turned_by() -> None:
    query, keys, values = attention(1, 2, 3, 320, 64)
    for spec, row, centroids in (("querypq", 4, 16), ("querypq:bits=8", 4, 256), ("querypq:subspaces=16", 8, 16)):
        cache = KVCache(make_selector(spec), sink=0, window=0, seal=32)
        cache.append(keys.bfloat16(), values.bfloat16(), query.bfloat16())
        cache.seal()
        found = cache.select(query[:, :, :, -1].bfloat16(), 16)
        assert found.scan_bytes.tolist() == [[320 * row + 2 * 64 * (centroids + 64) + 4 * 64] * 2]


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
        ({"subspaces": 256}, "subspaces is 128 or less, as sums of their tables have 16 bits, got 256"),
        ({"reach": 2.0}, "reach is a power of weights, 0 to 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            QueryPQ(**arguments)
    with pytest.raises(ValueError, match="a divisor of the head size, here of 64, got 5"):
        QueryPQ(5).check_shape(1, 1, 64)
