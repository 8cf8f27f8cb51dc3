"""InfLLM: which keys represent a block, and which blocks are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparseattn import InfLLM, KVCache, make_selector
from sparseattn.core.rope import Rope
from tests.cases import heads

PAGE, LOCAL, SINK = 8, 20, 2


def filled(selector: InfLLM, rows: int = 66) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    queries, keys, values = heads(1, 2, 2, rows, 16)
    cache = KVCache(selector, sink=SINK, window=0, seal=PAGE)
    cache.append(keys, values, queries)
    cache.seal()
    return cache, queries[0, :, :, SINK:], keys[0, :, SINK:]


def test_representatives_are_the_keys_that_following_queries_score_highest() -> None:
    selector = InfLLM(PAGE, 3, LOCAL)
    _, queries, keys = filled(selector)
    means = selector.means.data[0]  # [H,G,P,D]
    for h in range(2):
        for g in range(2):
            score = torch.stack([(queries[h, g, t : t + LOCAL] @ key).mean() for t, key in enumerate(keys[h])])
            for block in range(8):
                best = block * PAGE + score[block * PAGE :][:PAGE].topk(3).indices
                torch.testing.assert_close(means[h, g, block], keys[h, best].mean(0))


@pytest.mark.parametrize("group", ["layer", "sum", "each"])
def test_blocks_whose_representatives_have_the_largest_products_are_read(group: str) -> None:
    selector = InfLLM(PAGE, 2, LOCAL, group)
    cache, _, _ = filled(selector)
    query = torch.randn(1, 2, 2, 16)
    products = (selector.means.data * query[..., None, :]).sum(-1)[0]  # [H,G,P]
    by = {"layer": products.sum((0, 1)).expand(2, -1), "sum": products.sum(1), "each": products.flatten(0, 1)}
    selection = cache.select(query, 2 * PAGE)
    for chosen, scores in zip(selection.start[0] // PAGE, by[group], strict=True):
        assert set(chosen.tolist()) == set(scores.topk(2).indices.tolist())
    assert selection.scan_bytes is not None
    assert selection.scan_bytes.tolist() == [[8 * 2 * 16 * 4] * 2]


def test_keys_of_16_bits_are_scored_in_float32() -> None:
    """In bfloat16 near blocks would tie, and float16 ends at 65,504."""
    for dtype, factor in ((torch.bfloat16, 1.0), (torch.float16, 200.0)):
        queries, keys, values = (part.to(dtype) for part in heads(1, 2, 2, 258, 32))
        selector = InfLLM(PAGE, 2, LOCAL)
        cache = KVCache(selector, sink=SINK, window=0, seal=PAGE)
        cache.append(keys.clamp(-3, 3) * factor, values, queries)
        query = queries[:, :, :, -1].clamp(-3, 3) * factor
        chosen = cache.select(query, 8 * PAGE).start[0, 0] // PAGE
        scores = (selector.means.data.double() * query.double()[..., None, :]).sum(-1)
        assert (float(scores.max()) > 65504) == (factor > 1)
        assert set(chosen.tolist()) == set(scores.sum((0, 1, 2)).topk(8).indices.tolist())


def test_at_one_distance_a_block_scores_the_same_wherever_it_lies() -> None:
    """What repeats has the same representatives, and only RoPE tells its places apart."""
    rope, draw = Rope.of(16), torch.Generator().manual_seed(1)
    keys, queries = torch.randn(2, 1, 1, PAGE, 16, generator=draw).repeat(1, 1, 1, 4, 1)
    at = torch.arange(4 * PAGE)
    query = torch.randn(1, 1, 1, 16, generator=draw)
    scores = []
    for distance in (None, 10):
        selector = InfLLM(PAGE, PAGE, LOCAL, distance=distance)  # all rows, so that the choice does not matter
        selector.bind(replace(selector.layer_context, rope=rope))
        cache = KVCache(selector, sink=0, window=0, seal=PAGE)
        cache.append(rope.rotate(keys, at), keys, rope.rotate(queries, at)[:, :, None])
        cache.seal()
        means = selector.means.data
        scores.append(means[0, 0, 0] @ query[0, 0, 0])
        assert cache.select(query, PAGE).attended.tolist() == [[PAGE]]
    assert scores[1].std() < 1e-5 < 0.01 < scores[0].std()
    with pytest.raises(ValueError, match=r"no fixed RoPE of layer 0 is known here.+distance=None"):
        filled(InfLLM(PAGE, distance=10))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("infllm:page=12", "power of two rows, got 12"),
        ("infllm:page=4,representatives=5", "at most that many representatives, got 5"),
        ("infllm:local=0", "local is 1 or more, got 0"),
        ("infllm:group=all", "one of layer, max, sum, softmax, each, got 'all'"),
    ],
)
def test_arguments_out_of_range(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_selector(spec)
