"""Choices beside an independent form of each method's rule, in loops and float64, with the line of the source it is of.

Queries and keys are random, or of the synthetic generator, whose keys lie in clusters that queries aim at. The log
counts how many choices agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sparseattn import (
    Adamas,
    Delta,
    InfLLM2,
    KVCache,
    LessIsMore,
    Louver,
    RazorAttention,
    Selector,
    ShadowKV,
    SkipSoftmax,
    decode,
)
from tests.cases import attention, heads

H, G, D, ROWS, LAST = 2, 3, 32, 150, 12
DATA = {"random": heads, "structured": attention}

Rule = Callable[[Tensor, Tensor, int], Tensor]  # (queries [H,G,D], keys [H,N,D], budget) -> rows [H*G,k] or [H,k]


def choices(selector: Selector, data: str, rule: Rule, budget: int) -> tuple[int, int]:
    """How many choices of the last queries are the rule's, and of how many."""
    queries, keys, values = DATA[data](1, H, G, ROWS, D)
    cache = KVCache(selector, sink=0, window=0, seal=selector.unit, check=True)
    cache.append(keys, values, queries)
    same = total = 0
    for t in range(ROWS - LAST, ROWS):
        found = cache.select(queries[:, :, :, t], budget).rows[0].sort(-1).values
        expected = rule(queries[0, :, :, t].double(), keys[0].double(), budget).sort(-1).values
        same += int((found == expected).all(-1).sum())
        total += len(found)
    return same, total


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's matrix, of orthonormal columns."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    return reduce(torch.kron, [two] * (size.bit_length() - 1))


def adamas(threshold: float) -> Rule:
    """FibonaccciYan/Adamas, evaluation/adamas_attention.py:200-207: buckets of the transform, the least distance."""

    def rule(queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        chosen = []
        for h in range(H):
            edge = threshold or float(keys[h].square().mean().sqrt()) / 2
            edges = torch.tensor([-edge, 0.0, edge], dtype=torch.float64)
            own = torch.bucketize(keys[h] @ hadamard_matrix(D), edges)
            for g in range(G):
                code = torch.bucketize(queries[h, g] @ hadamard_matrix(D), edges)
                far = [(int((code - row).abs().sum()), -n) for n, row in enumerate(own)]
                chosen.append([-n for _, n in sorted(far)[:budget]])
        return torch.tensor(chosen)

    return rule


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_adamas(threshold: float, data: str) -> None:
    same, total = choices(Adamas(threshold), data, adamas(threshold), 20)
    assert (same, total) == (LAST * H * G, LAST * H * G)


def infllm2(page: int, each: bool) -> Rule:
    """OpenBMB/infllmv2_cuda_impl, tests/stage1/naive_softmax.py:33-34 (softmax, sum over a group), and
    infllm_v2/max_pooling_1d.py:14-16 (kernel 5, stride 4, padding 1 for blocks of 64)."""

    def rule(queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        keys = keys[:, : ROWS // page * page]
        chosen = []  # of two blocks with the same best window the older
        for h in range(H):
            windows = torch.stack([keys[h, i : i + 32].mean(0) for i in range(0, keys.shape[1] - 31, 16)])
            shares = (queries[h] @ windows.T / D**0.5).softmax(-1)
            for share in shares if each else [shares.sum(0)]:
                best = torch.nn.functional.max_pool1d(share[None], page // 16 + 1, page // 16, 1)[0].tolist()
                pages = sorted((-score, p) for p, score in enumerate(best))[: budget // page]
                chosen.append([p * page + i for _, p in pages for i in range(page)])
        return torch.tensor(chosen)

    return rule


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("page", "group"), [(16, "softmax"), (32, "softmax"), (32, "each")])
def test_infllm2(page: int, group: str, data: str) -> None:
    same, total = choices(InfLLM2(page, group), data, infllm2(page, group == "each"), 64)
    assert (same, total) == (LAST * H * (G if group == "each" else 1),) * 2


@pytest.mark.parametrize("data", DATA)
def test_razors_local_heads(data: str) -> None:
    """arXiv 2407.15891, equations 4 and 5: `N exp(q k)` of the mean key k, with the mean value, beside sink and newest
    rows."""
    queries, keys, values = DATA[data](1, H, G, ROWS, D)
    cache = KVCache(RazorAttention(8), sink=4, window=6, seal=8, check=True)
    cache.append(keys, values, queries)
    out = decode(queries[:, :, :, -1], cache, 24)[0].double()
    sealed = int(cache.sealed[0])
    old = slice(4, 4 + sealed - 24)
    near = [*range(4), *range(old.stop, ROWS)]
    for h in range(H):
        mean_key, mean_value = keys[0, h, old].double().mean(0), values[0, h, old].double().mean(0)
        for g in range(G):
            query = queries[0, h, g, -1].double()
            weights = (keys[0, h, near].double() @ query / D**0.5).exp()
            far = (sealed - 24) * (mean_key @ query / D**0.5).exp()
            expected = (weights @ values[0, h, near].double() + far * mean_value) / (weights.sum() + far)
            torch.testing.assert_close(out[h, g], expected, rtol=1e-5, atol=1e-5)


def lessismore(recent: float) -> Rule:
    """DerrickYLJ/LessIsMore, src/tidal_build/modify_llama_lim.py:118-161: each head's best of the older rows, their
    union in the order of ranks cut to its budget, the newest rows."""

    def rule(queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        middle = int(budget * (1 - recent))
        begin = ROWS - (budget - middle)
        ranked = torch.einsum("hgd,hnd->hgn", queries, keys[:, :begin]).flatten(0, 1).topk(middle).indices  # [HG,k]
        union = list(dict.fromkeys(ranked.T.flatten().tolist()))[:middle]
        return torch.tensor([[*union, *range(begin, ROWS)]] * H)

    return rule


def delta(page: int, recent: int) -> Rule:
    """hoenza/DELTA, DELTA/Engine/DELTA/page_score.py:51-53 (the largest weight of any head, summed over a page) and
    page_selector_v2.py:124-127 (the newest pages in any case)."""

    def rule(queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        weights = (torch.einsum("hgd,hnd->hgn", queries, keys) / D**0.5).softmax(-1).amax((0, 1))
        score = weights[: ROWS // page * page].view(-1, page).sum(-1)
        score[len(score) - recent :] = torch.inf
        pages = score.topk(budget // page).indices
        return (pages[:, None] * page + torch.arange(page)).flatten().expand(H, -1)

    return rule


def shadowkv(page: int, share: float) -> Rule:
    """ByteDance-Seed/ShadowKV, models/kv_cache.py:248-254 (landmarks, outliers by the least cosine) and 289-296 (the
    softmax over the other landmarks, the largest of a group)."""

    def rule(queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        chosen = []
        for h in range(H):
            chunks = keys[h, : ROWS // page * page].view(-1, page, D)
            landmarks = chunks.mean(1)
            cosine = torch.cosine_similarity(chunks, landmarks[:, None], dim=-1).amin(1)
            apart = cosine.argsort()[: int(budget // page * share)].tolist()
            rest = [c for c in range(len(chunks)) if c not in apart]
            shares = (queries[h] @ landmarks[rest].T / D**0.5).softmax(-1).amax(0)
            best = [rest[i] for i in shares.topk(budget // page - len(apart)).indices.tolist()]
            chosen.append([c * page + i for c in apart + best for i in range(page)])
        return torch.tensor(chosen)

    return rule


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(
    ("selector", "rule"),
    [
        (LessIsMore(), lessismore(0.25)),
        (LessIsMore(0.5), lessismore(0.5)),
        (Delta(8, 2), delta(8, 2)),
        (Delta(16, 0), delta(16, 0)),
        (ShadowKV(), shadowkv(8, 3 / 19)),
        (ShadowKV(4, 0.5), shadowkv(4, 0.5)),
    ],
    ids=lambda one: str(one) if isinstance(one, Selector) else "",
)
def test_lists_of_a_layer_and_landmarks(selector: Selector, rule: Rule, data: str) -> None:
    same, total = choices(selector.for_layer(0), data, rule, 64)
    assert (same, total) == (LAST * H, LAST * H)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("group", ["group", "each"])
def test_skipsoftmax(group: str, data: str) -> None:
    """docs.vllm.ai, vllm-omni, skip_softmax ("the skip test"): `exp(tile_max - m)` below `scale / n` skips a tile."""
    queries, keys, values = DATA[data](1, H, G, 160, D)
    queries = queries * 3  # so that some are skipped
    cache = KVCache(SkipSoftmax(8, 60.0, group), sink=0, window=0, seal=8, check=True)
    cache.append(keys, values, queries)
    read = 0
    for t in range(160 - LAST, 160):
        rows = cache.select(queries[:, :, :, t], None).rows[0]
        skipped = torch.ones(H, G, 20, dtype=torch.bool)
        for h in range(H):
            for g in range(G):
                logits, most = keys[0, h].double() @ queries[0, h, g, t].double() / D**0.5, -torch.inf
                for tile, best in enumerate(logits.view(20, 8).amax(1).tolist()):
                    most = max(most, best)
                    skipped[h, g, tile] = 2.718281828459045 ** (best - most) < 60.0 / 160
        expected = (~skipped).flatten(0, 1) if group == "each" else (~skipped).any(1)
        found = torch.zeros_like(expected)
        for head, own in enumerate(rows):
            found[head, own[own >= 0] // 8] = True
        assert torch.equal(found, expected)
        read += int(found.sum())
    assert 0 < read < LAST * 20 * H * (G if group == "each" else 1)


def louver(selector: Louver) -> Rule:
    """UIC-InDeXLab/Louver, benchmark_area/kernel_impl/TA_filter_algorithm.md ("Output": all keys that reach T), and
    experiments/threshold_oracle/threshold.py:76-122, of the selector's own sample. Their order is nobody's."""

    def rule(queries: Tensor, keys: Tensor, budget: int) -> Tensor:
        chosen = []
        for h in range(H):
            drawn = [n for n in selector.drawn.data[0, h].tolist() if n >= 0]
            for query in queries[h]:
                ranked = sorted((float(query @ keys[h, n]) for n in drawn), reverse=True)
                gaps = [above - below for above, below in pairwise(ranked)]
                first = min(sorted(range(len(gaps)), key=lambda i: -gaps[i])[:3]) + 1
                threshold = {
                    "share": ranked[max(1, int(budget * len(drawn) / keys.shape[1])) - 1],
                    "max": ranked[0],
                    "meanmax": (ranked[0] + sum(ranked) / len(ranked)) / 2,
                    "gap": ranked[first],
                }[selector.threshold]
                found = [(float(query @ key), n) for n, key in enumerate(keys[h])]
                reached = [n for product, n in sorted(found, reverse=True) if product >= threshold - 1e-6][:budget]
                chosen.append([*reached, *[-1] * (budget - len(reached))])
        return torch.tensor(chosen)

    return rule


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("threshold", ["share", "max", "meanmax", "gap"])
def test_louver(threshold: str, data: str) -> None:
    selector = Louver(threshold, sample=64, rows=2)
    same, total = choices(selector, data, louver(selector), 40)
    assert (same, total) == (LAST * H * G, LAST * H * G)


@pytest.mark.parametrize("data", DATA)
def test_louver_misses_none_by_balls_and_some_by_means(data: str) -> None:
    """The means of clusters are the authors' bounds, of which their TA_filter_algorithm.md says that they prove
    nothing (its last note)."""
    queries, keys, values = DATA[data](1, H, G, ROWS, D)
    missed = {True: 0, False: 0}
    for ball in missed:
        selector = Louver("meanmax", sample=64, rows=2, ball=ball)
        cache = KVCache(selector, sink=0, window=0, seal=2)
        cache.append(keys, values)
        for t in range(ROWS - LAST, ROWS):
            query = queries[:, :, :, t]
            chosen = cache.select(query, ROWS)
            threshold = selector.products(query, cache.search.step(), ROWS)
            reached = (query @ keys.mT >= threshold[..., None]).flatten(1, 2)
            missed[ball] += int((reached & ~chosen.mask(ROWS)).sum())
    assert missed[True] == 0
    assert missed[False] > 0


@pytest.mark.parametrize("p", [0.6, 0.99])
def test_louver_holds_the_mass_that_it_proves(p: float) -> None:
    """Ours: rows below `(1 - p) Z / N` weigh less than `1 - p` together, and Z is at least what is known of it."""
    queries, keys, values = attention(1, H, G, ROWS, D)
    cache = KVCache(Louver("mass", p, sample=16), sink=4, window=6, seal=4, check=True)
    cache.append(keys, values)
    read = 0
    for t in range(ROWS - LAST, ROWS):
        query = queries[:, :, :, t]
        mask = torch.ones(1, H * G, ROWS, dtype=torch.bool)
        sealed = int(cache.sealed[0])
        mask[..., 4 : 4 + sealed] = cache.select(query, ROWS).mask(sealed)
        weights = (query @ keys.mT / D**0.5).double().softmax(-1).flatten(1, 2)
        assert float((weights * mask).sum(-1).min()) >= p
        read += int(mask.sum())
    assert read < 0.9 * LAST * H * G * ROWS
