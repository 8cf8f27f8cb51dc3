"""Laws of a cache whose rows are dealt to processes: it computes what one process computes, and sends what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparseattn import KVCache, Ranks, decode
from sparseattn.cache import rank_checks
from sparseattn.cache.rank_choice import require_scores
from sparseattn.core.deal import Deal
from sparseattn.selectors.tokens.sign_base import SignCodes
from tests.cases import CASES, Case, missing
from tests.ranks import found

LIVES = "tests.cache.rank_lives"
FEW = ["quest", "quest-each", "lowbit", "lowbit-page", "exact-group", "mean", "recent", "window"]


def ties(case: Case) -> bool:
    """Whether rows are ranked by sign codes alone: rows of equal codes tie, and which of them is read is left open."""
    return isinstance(case.make(), SignCodes)


def allowed(case: Case, exact: bool) -> bool:
    if missing(case) is not None:
        return False
    try:
        rank_checks.check_dealable(selector := case.make())
        if exact:
            require_scores(selector)
    except ValueError:
        return False
    return True


def check(lives: dict[str, list[Any]]) -> None:
    """The laws, of every life."""
    for name, of_ranks in lives.items():
        kind, *_, ranks = name.split()
        assert len(of_ranks) == int(ranks), name
        for own in of_ranks:
            if kind == "refused":
                assert "rows of the first append is [40, " in own["rows"], own
                assert "window is [4, " in own["window"], own
                assert "rows is [77, " in own["lengths"], own
                continue
            if kind == "clocks":
                assert own == of_ranks[0], "what goes by the clock goes by the slowest's"
                assert max(own["chosen"]) > 0
                continue
            if kind == "drafts":
                assert own == of_ranks[0]
                assert all(own[how] for how in ("each", "once", "auto")), (name, own)
                continue
            if kind == "generate":
                assert all(own[how] for how in ("whole", "chunks", "lookup")), (name, own)
                continue
            assert own["far"] < 1e-4, (name, own)
            if kind == "exact":
                assert own["counted"] == own["predicted"], (name, own)
            else:
                assert set(own["sent"]) <= {"checks", "parts"}, "nothing is sent before attention"
        if kind == "exact":
            sealed = torch.tensor([own["sealed"] for own in of_ranks])
            assert bool((sealed.sum(0) >= sealed[0]).all())
            assert int((sealed.amax(0) - sealed.amin(0)).max()) <= 64, "dealt evenly, to a unit"
        elif kind == "union":
            assert sum(own["read"] for own in of_ranks) <= 64 + 16 * int(ranks)


def test_two_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    check(found(LIVES, tmp_path, 2, {"exact": FEW, "union": ["quest"]}, 100))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_method_over_one_to_four_ranks(part: int, tmp_path: Path) -> None:
    names = {
        "exact": [case.name for case in CASES if allowed(case, exact=True) and not ties(case)][part::4],
        "union": [case.name for case in CASES if allowed(case, exact=False) and case.exhaustive][part::4],
    }
    check(found(LIVES, tmp_path, 4, names, 590))


@pytest.mark.slow
def test_a_model_over_ranks_generates_what_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    check(found(LIVES, tmp_path, 3, {"exact": [], "union": [], "generate": ["quest:page=8", "lowbit:rows=16"]}, 590))


def test_a_deal_is_a_partition_in_whole_units() -> None:
    """Whatever was sealed before: every unit goes to one rank, in turn, and its number is known."""
    for size in range(1, 6):
        for seals in ([48, 16, 160, 16], [16] * 7, [320]):
            before, of_rank = 0, [[] for _ in range(size)]
            for rows in seals:
                every = torch.arange(before, before + rows)
                for rank in range(size):
                    (hand,) = Deal(16, rank, size).hands([before], [rows])
                    dealt = hand.of_rows(every).flatten()
                    assert len(dealt) == hand.rows
                    of_rank[rank] += dealt.tolist()
                before += rows
            assert sorted(row for own in of_rank for row in own) == list(range(before))
            for rank, own in enumerate(of_rank):
                deal = Deal(16, rank, size)
                assert len(own) <= deal.most(before)
                assert deal.numbers(torch.ones(1, len(own), dtype=torch.bool))[0].tolist() == own


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("selector", "settings", "why"),
    [
        ("quest", {"fixed": True, "capacity": 256}, "leave out fixed=True, or group"),
        ("quest", {"sealed_device": "cpu"}, "leave out sealed_device='cpu'"),
        ("quest", {"rows": "kivi"}, "leave out rows='kivi"),
        ("quest", {"group": 3}, "group is a process group of torch.distributed, or Ranks of one, got 3"),
        ("quest:int8=True", {}, "one step for a channel of a whole sequence"),
        ("pq", {}, "learned from the first rows that it is shown"),
        ("retrieval", {}, "LearnsFromQueries"),
        ("h2o", {}, "not dealt to ranks"),
        ("razor", {}, "HasTail"),
        ("topp", {}, "a share of the attention to all"),
        ("shadowkv", {}, "ShadowKV chooses in its own way"),
    ],
)
def test_what_cannot_be_dealt_says_so_at_construction(
    alone: Ranks, selector: str, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        KVCache(selector, **{"group": alone} | settings)


def test_ranks_and_their_budgets_are_checked(alone: Ranks) -> None:
    with pytest.raises(ValueError, match="share is one of exact, union"):
        Ranks(share="some")
    with pytest.raises(ValueError, match="slack is 0 or more, of share='union' alone"):
        Ranks(slack=0.5)
    cache = KVCache("quest", group=alone)
    cache.append(*torch.randn(2, 1, 1, 200, 16))
    with pytest.raises(ValueError, match="a mass as budget"):
        decode(torch.randn(1, 1, 2, 16), cache, "mass:0.9")
    with pytest.raises(ValueError, match="sends tensors of cpu"):
        alone.require_device(torch.device("meta"))


def test_no_processes() -> None:
    with pytest.raises(ValueError, match="has no processes yet: call"):
        Ranks()
