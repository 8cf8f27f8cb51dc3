"""Rows that A2SF, Keyformer, Scissorhands, ZipCache and FastGen hold, beside each rule in float64, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparseattn import A2SF, H2O, FastGen, Keyformer, KVCache, Scissorhands, ZipCache, decode
from tests.cases import attention, heads
from tests.selectors.test_eviction_methods import BUDGET, PROMPT, STEPS, D, G, H, attended, causal, steps

DATA = {"random": heads, "structured": attention}
Sums = Callable[[Tensor, Tensor, int], None]  # (total [H,N], weights [H,G,n] of a step, its position): adds them


def newest_and_best(held: Tensor, rank: Tensor, recent: int) -> None:
    """Drops, of rows held `[H,N]`, all but the newest `recent` and the best by `rank` `[H,N]` beyond these."""
    for h in range(H):
        mine = held[h].nonzero()[:, 0]
        older = mine[: len(mine) - recent]
        best = older[rank[h, older].topk(BUDGET - recent).indices]
        held[h] = False
        held[h, best] = held[h, mine[len(mine) - recent :]] = True


def agrees(cache: KVCache, data: str, total: Tensor, add: Sums, recent: int) -> None:
    """Every step of a cache reads what sums, and the newest rows, say."""
    queries, keys, values = DATA[data](1, H, G, PROMPT + STEPS, D)
    q, k, v = queries[0], keys[0], values[0]
    held = torch.zeros(H, PROMPT + STEPS, dtype=torch.bool)
    held[:, :PROMPT] = True
    for t, rows, out in steps(cache, queries, keys, values):
        newest_and_best(held, total, recent)
        held[:, t] = True
        assert torch.equal(rows, held[:, : t + 1]), t
        weights, expected = attended(q[:, :, t], k[:, : t + 1], v[:, : t + 1], rows)
        add(total, weights, t)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("data", DATA)
def test_a2sf_forgets_old_weights(data: str) -> None:
    """arXiv 2407.20485: the sum over queries q of forget^(n-q) S(q,k); Dirac-Notation/A2SF, policies/a2sf.py:17-18."""
    forget = 0.9
    queries, keys, _ = DATA[data](1, H, G, PROMPT + STEPS, D)
    weights = causal(queries[0, :, :, :PROMPT], keys[0, :, :PROMPT])  # [H,G,N,N]
    total = torch.zeros(H, PROMPT + STEPS, dtype=torch.float64)
    for asked in range(PROMPT):
        total[:, :PROMPT] += forget ** (PROMPT - 1 - asked) * weights[:, :, asked].sum(1)

    def add(total: Tensor, weights: Tensor, t: int) -> None:
        total *= forget
        total[:, : t + 1] += weights.sum(1)

    cache = KVCache(A2SF(forget), sink=0, window=1, seal=1, check=True)
    agrees(cache, data, total, add, BUDGET // 2)


@pytest.mark.parametrize("setting", [(0, 1, 1), (3, 9, 4)], ids=["paper", "window"])
def test_a2sf_that_forgets_nothing_is_h2o(setting: tuple[int, int, int]) -> None:
    queries, keys, values = attention(2, H, G, PROMPT + STEPS, D)
    sink, window, seal = setting
    caches = [KVCache(one, sink=sink, window=window, seal=seal) for one in (A2SF(1.0), H2O())]
    for cache in caches:
        cache.append(keys[:, :, :PROMPT], values[:, :, :PROMPT], queries[:, :, :, :PROMPT])
    for t in range(PROMPT, PROMPT + STEPS):
        one = slice(t, t + 1)
        for cache in caches:
            cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        ours, theirs = (decode(queries[:, :, :, t], cache, BUDGET) for cache in caches)
        assert torch.equal(ours, theirs)
        assert torch.equal(caches[0].selector.held(), caches[1].selector.held())


@pytest.mark.parametrize("data", DATA)
def test_keyformer_sums_noisy_softmaxes(data: str) -> None:
    """d-matrix-ai/keyformer-llm, mpt-keyformer-lib/attention.py:124-140 and 150-165: tau is 1 for the prompt and 0.01
    more at each step; the noise is the selector's own, as theirs is drawn anew."""
    queries, keys, _ = DATA[data](1, H, G, PROMPT + STEPS, D)
    keyformer = Keyformer()
    logits = queries[0, :, :, :PROMPT].double() @ keys[0, :, None, :PROMPT].double().mT / D**0.5
    logits = logits.masked_fill(~torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril(), -torch.inf)
    place = torch.arange(PROMPT)
    noise = torch.stack([keyformer.noise(h, G, place, place[None]) for h in range(H)])
    total = torch.zeros(H, PROMPT + STEPS, dtype=torch.float64)
    total[:, :PROMPT] = (logits + noise).softmax(-1).sum((1, 2))

    def add(total: Tensor, weights: Tensor, t: int) -> None:
        place = torch.arange(t + 1)[None]
        noise = torch.stack([keyformer.noise(h, G, place[0, -1:], place)[:, 0] for h in range(H)])
        tau = 1 + 0.01 * (t - PROMPT + 1)
        total[:, : t + 1] += ((weights.log() + noise) / tau).softmax(-1).sum(1)

    cache = KVCache(keyformer, sink=0, window=1, seal=1, check=True)
    agrees(cache, data, total, add, int(0.3 * BUDGET))


def test_keyformers_noise_is_gumbels_and_each_querys_own() -> None:
    keyformer, asked, place = Keyformer(seed=3), torch.arange(500, 700), torch.arange(400)
    noise = torch.cat([keyformer.noise(h, G, asked, place[None]) for h in range(H)])  # [HG,m,n]
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(1.6449, rel=0.02)
    each = noise.flatten(0, 1)
    assert float(torch.corrcoef(each[::17]).fill_diagonal_(0).abs().mean()) < 0.06
    later = keyformer.noise(1, G, asked[70:71], place[None, 30:31])
    assert torch.equal(later[:, 0, 0], noise[G:, 70, 30]), "it is of the positions"
    assert not torch.equal(Keyformer(seed=4).noise(1, G, asked, place[None]), noise[G:])


@pytest.mark.parametrize("data", DATA)
def test_scissorhands_counts_queries_that_a_row_was_pivotal_for(data: str) -> None:
    """AnswerDotAI/cold-compress, cache.py:704 (an even share) and 727-745 (the mean of the last records, the newest
    saved), with the paper's single queries; of equal shares the newest stay."""
    queries, keys, values = DATA[data](1, H, G, PROMPT + STEPS, D)
    q, k, v = queries[0], keys[0], values[0]
    history, recent = 16, 5
    records: list[list[list[bool]]] = [[[] for _ in range(PROMPT + STEPS)] for _ in range(H)]
    for asked, weights in enumerate(causal(q[:, :, :PROMPT], k[:, :PROMPT]).mean(1).unbind(1)):  # [H,N]
        for h in range(H):
            for row in range(asked + 1):
                records[h][row].append(bool(weights[h, row] >= 1 / (asked + 1)))
    held = torch.zeros(H, PROMPT + STEPS, dtype=torch.bool)
    held[:, :PROMPT] = True
    for t, rows, out in steps(KVCache(Scissorhands(history, recent), sink=0, window=1, seal=1), queries, keys, values):
        rank = torch.zeros(H, PROMPT + STEPS, dtype=torch.float64)
        for h in range(H):
            for row in range(t):
                last = records[h][row][-history:]
                rank[h, row] = sum(last) / len(last) + 1e-6 * row
        newest_and_best(held, rank, recent)
        held[:, t] = True
        assert torch.equal(rows, held[:, : t + 1]), t
        weights, expected = attended(q[:, :, t], k[:, : t + 1], v[:, : t + 1], rows)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        for h in range(H):
            for row in held[h].nonzero()[:, 0].tolist():
                records[h][row].append(bool(weights[h, :, row].mean() >= 1 / int(held[h].sum())))


@pytest.mark.parametrize(("selector", "budget"), [(FastGen(), 16), (Scissorhands(), 4), (Scissorhands(), 9)], ids=str)
def test_a_budget_below_the_newest_rows_holds_the_newest_of_them(selector: FastGen | Scissorhands, budget: int) -> None:
    queries, keys, values = heads(1, 1, G, 300, D)
    cache = KVCache(selector.for_layer(0), sink=0, window=1, seal=1, check=True)
    cache.append(keys[:, :, :290], values[:, :, :290], queries[:, :, :, :290])
    for t in range(290, 300):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        rows = cache.select(queries[:, :, :, t], budget).rows[0, 0]
        assert rows.sort().values.tolist() == list(range(t - budget, t))
    if isinstance(cache.selector, FastGen):
        assert cache.selector.last.data.tolist() == [[[87]]], "the head's policy has a local window"


def test_fastgen_holds_the_first_of_the_first_tokens_where_the_budget_is_below_their_number() -> None:
    queries, keys, values = heads(1, H, G, 300, D)
    cache = KVCache(FastGen(0.0, special=40), sink=0, window=1, seal=1, check=True)
    cache.append(keys, values, queries)
    for budget in (17, 16, 3):
        rows = cache.select(queries[:, :, :, -1], budget).rows
        assert rows.sort().values.tolist() == [[list(range(budget))] * H]


@pytest.mark.parametrize("data", DATA)
def test_zipcache_divides_by_how_many_queries_see_a_row(data: str) -> None:
    """ThisisBillhe/ZipCache, zipcache/models/modeling_llama.py:778-795: probes, their sum over a group, over N - j."""
    queries, keys, values = DATA[data](1, H, G, PROMPT + STEPS, D)
    selector = ZipCache(0.1)
    probes = selector.probes(torch.arange(PROMPT)[None])[0]
    probes = probes[probes >= 0]
    assert len(probes) == 18
    assert probes[-9:].tolist() == list(range(PROMPT - 9, PROMPT)), "the newest tenth, and as many others"
    weights = causal(queries[0, :, :, :PROMPT], keys[0, :, :PROMPT])[:, :, probes].sum((1, 2))  # [H,N]
    score = weights / (PROMPT - torch.arange(PROMPT))
    for h, mine in enumerate(score):  # the row of the prompt's last token is not sealed when the first step begins
        cache = KVCache(selector.for_layer(0), sink=0, window=1, seal=4096)
        cache.append(keys[:, :, :PROMPT], values[:, :, :PROMPT], queries[:, :, :, :PROMPT])
        cache.seal()
        rows = cache.select(queries[:, :, :, PROMPT], BUDGET).rows[0, h]
        assert rows.sort().values.tolist() == mine[: PROMPT - 1].topk(BUDGET).indices.sort().values.tolist()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: A2SF(0.0), "above 0 and up to 1, which is H2O, got 0.0"),
        (lambda: A2SF(recent=-0.1), "0 to 1, got -0.1"),
        (lambda: Keyformer(rise=-1.0), "0 or more, got -1.0"),
        (lambda: Scissorhands(history=12), "a multiple of 8 queries, got 12"),
        (lambda: Scissorhands(history=0), "history is 8 or more"),
        (lambda: Scissorhands(recent=-1), "recent is 0 or more"),
    ],
)
def test_bad_arguments_get_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def profile(weights: Tensor, recovery: float) -> tuple[int, Tensor, int]:
    """The policy of a head whose queries have `weights` `[G,N,N]`, what it holds of the prompt, and its newest rows."""
    many, sums, window = math.ceil(0.3 * PROMPT), weights.sum((0, 1)), int(0.3 * PROMPT)
    columns = torch.arange(PROMPT)
    first = columns < 4
    masks = [first.expand(PROMPT, PROMPT)]
    for local in (0, window):
        mask = first | (columns > columns[:, None] - local) & (columns <= columns[:, None])
        free = (~mask[-1]).nonzero()[:, 0]
        mask = mask.clone()
        mask[:, free[sums[free].topk(min(many, len(free))).indices]] = True
        masks.append(mask)
    masks.append(torch.ones(PROMPT, PROMPT, dtype=torch.bool))
    recovered = [float((weights * mask).sum(-1).mean()) for mask in masks]
    policy = next(i for i, share in enumerate(recovered) if share >= recovery or i == 3)
    return policy, masks[policy][-1], window if policy == 2 else 0


@pytest.mark.parametrize("data", DATA)
def test_fastgen_holds_what_each_heads_policy_does(data: str) -> None:
    """AnswerDotAI/cold-compress, cache.py:1066-1136 (masks), 1161-1173 (the first that recovers enough, in the mean of
    queries) and 844-893 (the least goes, first and newest rows saved); sums of weights, as arXiv 2310.01801 has."""
    queries, keys, values = DATA[data](1, H, G, PROMPT + STEPS, D)
    q, k, v = queries[0], keys[0], values[0]
    weights = causal(q[:, :, :PROMPT], k[:, :PROMPT])
    shares = [float(w[:, :, :4].sum(-1).mean()) for w in weights]
    seen = set()
    for recovery in (min(shares) * 0.9, 0.7, 0.8, 0.9, 0.999):
        held = torch.zeros(H, PROMPT + STEPS, dtype=torch.bool)
        most, last = [], []
        total = torch.zeros(H, PROMPT + STEPS, dtype=torch.float64)
        for h in range(H):
            policy, held[h, :PROMPT], window = profile(weights[h], recovery)
            seen.add(policy)
            most.append(PROMPT + STEPS if policy == 3 else int(held[h].sum()))
            last.append(window)
            total[h, :PROMPT] = weights[h].sum((0, 1))
        cache = KVCache(FastGen(recovery), sink=0, window=1, seal=1, check=True)
        for t, rows, out in steps(cache, queries, keys, values, None):
            for h in range(H):
                mine = held[h].nonzero()[:, 0].tolist()
                saved = {*range(4), *mine[len(mine) - last[h] :]}
                for row in sorted((row for row in mine if row not in saved), key=total[h].__getitem__)[
                    : max(len(mine) - most[h], 0)
                ]:
                    held[h, row] = False
            held[:, t] = True
            assert torch.equal(rows, held[:, : t + 1]), (recovery, t)
            now, expected = attended(q[:, :, t], k[:, : t + 1], v[:, : t + 1], rows)
            total[:, : t + 1] += now.sum(1)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert seen == {0, 1, 2, 3}
