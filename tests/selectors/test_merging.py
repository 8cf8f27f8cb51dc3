"""What the merging methods hold and read, beside each rule in float64, step by step; and what a merged row is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparseattn import D2O, H2O, CaM, ElasticCache, KVCache, KVMerger, decode
from tests.cases import attention, heads
from tests.selectors.test_eviction_methods import BUDGET, PROMPT, STEPS, D, G, H, causal, steps

DATA = {"random": heads, "structured": attention}
BOTH = pytest.mark.parametrize("data", DATA)


class Plain:
    """Rows of each KV head in dictionaries, in float64, that a rule changes before every step."""

    def __init__(self, keys: Tensor, values: Tensor, seen: int) -> None:
        self.keys, self.values = keys.double().clone(), values.double().clone()  # [H,N,D]
        self.held = [list(range(seen)) for _ in range(H)]
        self.mass = [dict.fromkeys(range(keys.shape[1]), 1.0) for _ in range(H)]

    def read(self, query: Tensor, weigh: bool) -> tuple[list[dict[int, Tensor]], Tensor]:
        """Weights `[G]` by row of each head, and the output `[H,G,D]`."""
        weights, out = [], []
        for h, rows in enumerate(self.held):
            logits = query[h].double() @ self.keys[h][rows].T / D**0.5
            if weigh:
                logits = logits + torch.tensor([math.log(self.mass[h][row]) for row in rows])
            share = logits.softmax(-1)
            weights.append(dict(zip(rows, share.unbind(1), strict=True)))
            out.append(share @ self.values[h][rows])
        return weights, torch.stack(out)


Rule = Callable[[Plain, int], None]
Note = Callable[[list[dict[int, Tensor]], int], None]


def agrees(cache: KVCache, data: str, rule: Rule, note: Note, weigh: bool = False) -> int:
    """How many choices of a step and head are the plain rule's; every output is."""
    queries, keys, values = DATA[data](1, H, G, PROMPT + STEPS, D)
    plain, equal = Plain(keys[0], values[0], PROMPT), 0
    for t, _, out in steps(cache, queries, keys, values):
        rule(plain, t)
        for h in range(H):
            equal += cache.selector.held()[0, h].nonzero()[:, 0].tolist() == plain.held[h]  # type: ignore[attr-defined]
            plain.held[h].append(t)
        weights, expected = plain.read(queries[0, :, :, t], weigh)
        note(weights, t)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    return equal


def nothing(weights: list[dict[int, Tensor]], t: int) -> None:
    """A rule that learns nothing of a step."""


def prompt_sums(data: str) -> Tensor:
    """`[H,N]` float64: what the prompt's queries gave."""
    queries, keys, _ = DATA[data](1, H, G, PROMPT + STEPS, D)
    total = torch.zeros(H, PROMPT + STEPS, dtype=torch.float64)
    total[:, :PROMPT] = causal(queries[0, :, :, :PROMPT], keys[0, :, :PROMPT]).sum((1, 2))
    return total


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@BOTH
@pytest.mark.parametrize("weigh", [False, True])
def test_d2o_merges_what_h2o_drops(data: str, weigh: bool) -> None:
    """AIoT-MLSys-Lab/D2O, modeling_llama3_7b_13b_d2o.py:333-400: H2O's choice, the nearest by cosine, a threshold that
    is half of the old one and half of the new mean, and means with cosines as weights; each head by its own cosine."""
    total, threshold = prompt_sums(data), [math.nan]

    def rule(plain: Plain, t: int) -> None:
        found = []
        for h in range(H):
            mine = plain.held[h]
            older = mine[: len(mine) - BUDGET // 2]
            best = sorted(older, key=lambda row: -float(total[h, row]))[: BUDGET - BUDGET // 2]
            kept = sorted(best) + mine[len(mine) - BUDGET // 2 :]
            for row in sorted(set(mine) - set(kept)):
                near = [cosine(plain.keys[h, row], plain.keys[h, into]) for into in kept]
                found.append((h, row, kept[near.index(max(near))], max(near)))
            plain.held[h] = kept
        if not found:
            return
        mean = sum(near for *_, near in found) / len(found)
        threshold[0] = mean if math.isnan(threshold[0]) else 0.5 * threshold[0] + 0.5 * mean
        for h in range(H):
            by_target: dict[int, list[tuple[int, float]]] = {}
            for head, row, into, near in found:
                if head == h and near >= threshold[0]:
                    by_target.setdefault(into, []).append((row, near))
            for into, merged in by_target.items():
                for part in (plain.keys[h], plain.values[h]):
                    part[into] = (part[into] + sum(near * part[row] for row, near in merged)) / (1 + len(merged))
                plain.mass[h][into] += sum(plain.mass[h][row] for row, _ in merged)

    def note(weights: list[dict[int, Tensor]], t: int) -> None:
        for h in range(H):
            for row, weight in weights[h].items():
                total[h, row] += float(weight.sum())

    cache = KVCache(D2O(weigh=weigh), sink=0, window=1, seal=1, check=True)
    assert agrees(cache, data, rule, note, weigh) == STEPS * H


@BOTH
def test_elastic_cache_averages_neighbours_into_anchors(data: str) -> None:
    """liuzuyan/ElasticCache, kv_cache.py:60-110: sums over all heads, the nearest anchor by position, means; later the
    row `distance` before the newest goes."""
    total, distance = prompt_sums(data).sum(0), 9

    def rule(plain: Plain, t: int) -> None:
        for h in range(H):
            mine = plain.held[h]
            if t > PROMPT:
                del mine[BUDGET - distance]
                continue
            kept = sorted(sorted(mine, key=lambda row: -float(total[row]))[:BUDGET])
            of = {into: [into] for into in kept}
            for row in set(mine) - set(kept):
                of[min(kept, key=lambda into: (abs(into - row), into))].append(row)
            for part in (plain.keys[h], plain.values[h]):
                for into, rows in of.items():
                    part[into] = part[rows].mean(0)
            plain.held[h] = kept

    cache = KVCache(ElasticCache(distance), sink=0, window=1, seal=1, check=True)
    assert agrees(cache, data, rule, nothing) == STEPS * H


@BOTH
def test_cam_spreads_the_value_of_a_row_that_leaves(data: str) -> None:
    """zyxxmu/cam, cam_hf/utils_hh/modify_llama_cam.py:21-34: a chance of its weight over the mean weight of the newer
    rows, a share of its value to each of the next `spread`; the chance is the selector's own draw."""
    selector, spread = CaM(5), 5
    selector.kv = H
    chance = selector.chance(torch.arange(PROMPT + STEPS))
    last: list[dict[int, Tensor]] = []
    merged = 0

    def rule(plain: Plain, t: int) -> None:
        nonlocal merged
        for h in range(H):
            mine = plain.held[h]
            if t == PROMPT:
                plain.held[h] = mine[-BUDGET:]
                continue
            row, kept = mine[0], mine[1:]
            newer = [float(last[h][into].sum()) for into in kept[:-1]]  # the newest was the step's own token
            if float(chance[h, row]) < float(last[h][row].sum()) / (sum(newer) / len(newer)):
                merged += 1
                for into in kept[:spread]:
                    plain.values[h, into] += plain.values[h, row] / spread
            plain.held[h] = kept

    def note(weights: list[dict[int, Tensor]], t: int) -> None:
        last[:] = weights

    cache = KVCache(selector, sink=0, window=1, seal=1, check=True)
    assert agrees(cache, data, rule, note) == STEPS * H
    assert 10 < merged < STEPS * H - 10


@BOTH
def test_kvmerger_joins_the_most_similar_neighbours(data: str) -> None:
    """The paper's runs (neighbours above a threshold) and weights; others' code (Attention Matching, kvmerger.py), with
    a search for the threshold that leaves as many runs as the budget has rows."""
    total = prompt_sums(data)

    def rule(plain: Plain, t: int) -> None:
        for h in range(H):
            mine, keys, values = plain.held[h], plain.keys[h], plain.values[h]
            near = [cosine(keys[a], keys[b]) for a, b in itertools.pairwise(mine)]
            least = sorted(near)[BUDGET - 1] if len(mine) > BUDGET else math.inf  # pairs as near as this are joined
            runs = [[mine[0]]]
            for row, similar in zip(mine[1:], near, strict=True):
                if similar >= least:
                    runs[-1].append(row)
                else:
                    runs.append([row])
            plain.held[h] = []
            for run in runs:
                heavy = max(run, key=lambda row: float(total[h, row]) if row < PROMPT else -1.0 - row)
                square = [float((keys[row] - keys[heavy]).square().sum()) for row in run]
                if len(run) > 1:
                    width = sum(square) / (len(run) - 1)
                    weight = torch.tensor([math.exp(-one / (2 * width)) for one in square], dtype=torch.float64)
                    for part in (keys, values):
                        part[heavy] = (weight[:, None] * part[run]).sum(0) / weight.sum()
                plain.held[h].append(heavy)

    cache = KVCache(KVMerger(), sink=0, window=1, seal=1, check=True)
    assert agrees(cache, data, rule, nothing) == STEPS * H


def test_rows_that_are_alike_lose_nothing_where_a_merged_row_counts_as_all_of_them() -> None:
    """Every key and value four times: runs of four become a row, whose bias makes it four."""
    queries, keys, values = heads(1, H, G, 4 * BUDGET, D)
    keys, values = (part[:, :, ::4].repeat_interleave(4, 2) for part in (keys, values))
    full = KVCache(H2O(), sink=0, window=1)
    merged = [KVCache(KVMerger(weigh), sink=0, window=4, seal=4) for weigh in (True, False)]
    for cache in (full, *merged):
        cache.append(keys, values, queries)
    query = queries[:, :, :, -1]
    right = decode(query, full, None)
    off = [float((decode(query, cache, BUDGET - 1) - right).norm()) for cache in merged]
    assert off[0] < 1e-5 * float(right.norm()) < 100 * off[1]


@pytest.mark.parametrize("make", [D2O, KVMerger, ElasticCache, CaM])
def test_rows_read_and_rows_of_the_tail_are_no_more_than_the_budget(make: type) -> None:
    queries, keys, values = attention(2, H, G, PROMPT + STEPS, D)
    cache = KVCache(make(), sink=2, window=3, seal=1, check=True)
    for t, _, _ in steps(cache, queries, keys, values):
        found, tail = cache.search.latest, cache.search.latest_tail
        assert found is not None
        apart = torch.zeros_like(found.attended) if tail is None else tail.selection.attended
        assert bool((found.attended + apart == BUDGET).all()), t
        if tail is not None:
            assert not bool((found.mask(200) & tail.selection.mask(200)).any())


@pytest.mark.parametrize("make", [D2O, KVMerger, ElasticCache, CaM])
def test_fixed_storage_is_refused_in_a_sentence(make: type) -> None:
    queries, keys, values = attention(1, H, G, PROMPT, D)
    with pytest.raises(ValueError, match="merges rows head by head, on the host's word"):
        KVCache(make(), fixed=True, capacity=200).append(keys, values, queries)


def test_arguments_that_are_none() -> None:
    with pytest.raises(ValueError, match="forget is the newest mean's share of the threshold, 0 to 1, got 2"):
        D2O(forget=2)
    with pytest.raises(ValueError, match="distance is 1 or more, got 0"):
        ElasticCache(0)
    with pytest.raises(ValueError, match="spread is 1 or more, got 0"):
        CaM(0)
