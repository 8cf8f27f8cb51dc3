"""Recall against keys scanned: one index, its knob turned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sparseattn.cache.selection_checks import ContractError
from sparseattn.core.context import StepContext
from sparseattn.core.selection import Selection
from sparseattn.evaluation.recall_curve import Curve, crossing, within
from sparseattn.evaluation.recall_sweep import Problem, check, curve, curves, ladder, top_keys
from sparseattn.selectors.base import Rows
from sparseattn.selectors.baselines.exact import Exact
from sparseattn.selectors.graphs.faiss_indexes import IVF, Flat
from sparseattn.selectors.pages.quest import Quest
from sparseattn.traces.synthetic import synthetic

KEYS, QUERIES = 2000, 16


@pytest.fixture(scope="module")
def tasks() -> dict[str, list[Problem]]:
    """Two layers of 2 KV heads and 2 query heads each, and the control."""
    trace = synthetic(KEYS + QUERIES, heads=2, group=2, size=32, layers=2, clusters=64, sinks=0)
    layers = [trace.layer(i) for i in trace.layers]
    return {
        "queries": [Problem.of(layer, trace.positions, QUERIES) for layer in layers],
        "control": [Problem.of(layer, trace.positions, QUERIES, held_out=True) for layer in layers],
    }


def recalls(one: Curve) -> list[float]:
    return [point.mean("recall") for point in one.points]


def scans(one: Curve) -> list[float]:
    return [point.mean("scanned_share") for point in one.points]


def test_scoring_every_key_finds_everything(tasks: dict[str, list[Problem]]) -> None:
    for method in (Flat(), Exact()):
        for name, one in curves(method, tasks, k=50).items():
            assert recalls(one) == [1.0]
            assert scans(one) == [1.0]
            assert one.points[0].value is None
            assert one.points[0].seconds > 0
            heads = 8 if name == "queries" else 4
            assert one.points[0].heads["recall"].shape == (heads,)
            # Every key to choose, and at least 50 keys and values to attend.
            assert 0.5 + 50 / KEYS <= one.points[0].mean("bytes_share") <= 0.5 + 100 / KEYS


def test_more_probes_scan_more_and_find_more_until_everything(tasks: dict[str, list[Problem]]) -> None:
    one = curves("ivf:lists=32", tasks, k=50)["queries"]
    assert [point.value for point in one.points] == list(ladder(32))[: len(one.points)]
    assert all(a < b for a, b in pairwise(scans(one)))
    assert all(a <= b + 1e-9 for a, b in pairwise(recalls(one)))
    assert recalls(one)[-1] >= 0.995 or scans(one)[-1] >= 0.6
    assert recalls(one)[-2] < 0.995
    assert scans(one)[-2] < 0.6
    assert one.points[2].selector == "ivf:lists=32,probes=3,seed=0"
    whole = curves("ivf:lists=32", tasks, k=50, values=[1, 32])["queries"]
    assert recalls(whole)[-1] == 1.0
    assert scans(whole)[-1] == pytest.approx(1 + 32 / KEYS)
    assert recalls(whole)[0] == recalls(one)[0], "the same again"
    assert one.selector == "ivf:lists=32,probes=64,seed=0"


def test_recall_counts_the_exact_top_keys() -> None:
    """A selector that names rows 0 to 4 in stored order, against a count by hand."""

    class First(Quest):
        def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
            return Selection.tokens(torch.arange(5).expand(1, query.shape[1], 5))

        def scan(self, query: Tensor, sealed: int, budget: int) -> None:
            return None

    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(2, 16, 8, generator=generator), torch.randn(2, 3, 4, 8, generator=generator)
    one = curve(First(), keys, queries, k=16)
    assert recalls(one) == [pytest.approx(5 / 16)]
    assert math.isnan(one.points[0].mean("scanned_share")), "it does not say"
    assert one.records()[0]["mean"]["scanned_share"] is None
    one = curve(First(page=1), keys, queries, k=5)
    top = top_keys(queries, keys, 5)
    by_hand = [[len(set(range(5)) & set(q.tolist())) / 5 for q in g] for h in top for g in h]
    assert one.points[0].heads["recall"].tolist() == pytest.approx([sum(head) / 4 for head in by_hand])
    scores = (queries.double() @ keys.double()[:, None].mT).argsort(-1, descending=True)
    assert torch.equal(top, scores[..., :5])


def test_a_reordered_store_is_asked_for_its_own_rows(tasks: dict[str, list[Problem]]) -> None:
    class Reversed(Exact):
        def append(self, rows: Rows) -> Tensor:
            super().append(rows)
            batch, heads, new, _ = rows.keys.shape
            return torch.arange(new).flip(0).expand(batch, heads, new)

    assert recalls(curves(Reversed(), tasks, k=50)["queries"]) == [1.0]


def test_one_index_serves_all_tasks_of_a_selector_without_queries(
    tasks: dict[str, list[Problem]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    real = IVF.append
    monkeypatch.setattr(IVF, "append", lambda self, rows: (built.append(rows.keys.shape[2]), real(self, rows))[1])
    made = curves("ivf", tasks, k=50, values=[8])
    assert built.count(KEYS) == 2, "once a layer"
    assert made["queries"].build_seconds == made["control"].build_seconds > 0
    alone = curves("ivf", {"control": tasks["control"]}, k=50, values=[8])
    assert recalls(alone["control"]) == recalls(made["control"]), "the tasks before leave nothing behind"
    assert recalls(made["control"])[0] > recalls(made["queries"])[0]


@pytest.mark.slow
def test_a_selector_that_learns_is_built_for_each_task(tasks: dict[str, list[Problem]]) -> None:
    pytest.importorskip("numba")
    made = curves("retrieval", tasks, k=50)
    for one, problems in zip(made.values(), tasks.values(), strict=True):
        alone = curve("retrieval", problems[0].keys, problems[0].queries, problems[0].training, k=50)
        assert recalls(one)[-1] > 0.9
        assert alone.settings["keys"] == one.settings["keys"] == KEYS
    values = [point.value for point in made["queries"].points]
    assert values[0] == 1, "one below k does what the first does"
    assert all(value > 50 for value in values[1:])
    without = [Problem(one.keys, one.queries) for one in tasks["queries"]]
    with pytest.raises(ValueError, match="learns from queries"):
        curves("retrieval", {"queries": without}, k=50)


def test_a_static_choice_is_forgotten_between_tasks(tasks: dict[str, list[Problem]]) -> None:
    made = curves("exact:refresh=20", tasks, k=50)
    assert recalls(made["queries"])[0] < 1
    assert recalls(made["control"])[0] < 1


@pytest.mark.parametrize("fault", ["twice", "many", "beyond"])
def test_a_selection_that_breaks_the_contract_is_a_fault(fault: str, tasks: dict[str, list[Problem]]) -> None:
    class Wrong(Flat):
        def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
            ids = {"twice": [1, 1], "many": range(budget + 1), "beyond": [KEYS]}[fault]
            return Selection.tokens(torch.tensor(list(ids)).expand(1, query.shape[1], -1))

    said = {
        "twice": "names row 1 of which another",
        "many": "51 rows for a budget of 50",
        "beyond": "names row 2000, and",
    }
    with pytest.raises(ContractError, match=said[fault]):
        curves(Wrong(), tasks, k=50)


def test_what_lies_between_measured_points() -> None:
    scanned, recall = [0.01, 0.04, 0.16], [0.5, 0.9, 1.0]
    assert crossing(scanned, recall, 0.95) == pytest.approx(0.08), "half way in the logarithm"
    assert crossing(scanned, recall, 0.9) == pytest.approx(0.04)
    assert crossing(scanned, recall, 0.3) == 0.01, "at most the first"
    assert math.isnan(crossing(scanned, [0.5, 0.6, 0.7], 0.95))
    assert crossing([0.16, 0.01, 0.04], [1.0, 0.5, 0.9], 0.95) == pytest.approx(0.08), "in any order"
    assert crossing([1.0], [1.0], 0.95) == 1.0
    assert within(scanned, recall, 0.02) == pytest.approx(0.7)
    assert within(scanned, recall, 0.04) == pytest.approx(0.9)
    assert within(scanned, recall, 0.5) == 1.0, "the last"
    assert math.isnan(within(scanned, recall, 0.001))


def test_the_ladder_rises_by_a_half_at_most_beyond_small_numbers() -> None:
    steps = list(ladder(5000))
    assert steps[:6] == [1, 2, 3, 4, 6, 8]
    assert all(1.3 < b / a <= 1.5 for a, b in pairwise(steps[3:]))
    assert 5000 / 1.5 < steps[-1] <= 5000
    assert list(ladder(1)) == [1]


def test_a_sweep_ends_where_more_work_finds_no_more(tasks: dict[str, list[Problem]]) -> None:
    class Poor(Exact):
        """Scores `knob` hundredths of the keys, and finds what `found` says, in hundredths."""

        knob = "part"
        found = staticmethod(lambda part: part)

        def __init__(self, part: int = 1) -> None:
            super().__init__()
            self.part = part

        def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
            best = super().select(query, step, budget).rows[..., : max(1, budget * self.found(self.part) // 100)]
            return Selection.tokens(best, torch.full(best.shape[:2], KEYS * self.part // 100))

    def ends(found: Callable[[int], int]) -> float:
        return scans(curves(type("One", (Poor,), {"found": staticmethod(found)})(), tasks, k=100)["queries"])[-1]

    assert ends(lambda part: part) == pytest.approx(0.80), "the first beyond 0.6"
    assert ends(lambda part: 10 * part) == pytest.approx(0.11), "everything found"
    assert ends(lambda part: 50) == pytest.approx(0.21), "nothing gained, and a fifth scanned"
    assert ends(lambda part: min(50 + part, 80)) == pytest.approx(0.80), "four turns before, less was found"


def test_seconds_are_read_off_at_the_same_place(tasks: dict[str, list[Problem]]) -> None:
    one = curves("ivf:lists=32", tasks, k=50)["queries"]
    level = (recalls(one)[2] + recalls(one)[3]) / 2
    middle = (one.points[2].seconds + one.points[3].seconds) / 2
    assert one.seconds_at(level) == pytest.approx(middle)
    assert scans(one)[2] < one.scanned_at(level) < scans(one)[3]
    assert one.recall_at(one.scanned_at(level)) == pytest.approx(level)
    assert one.recall_at(0.5, worst=True) <= one.recall_at(0.5)
    assert math.isnan(one.seconds_at(1.1))


def test_records_hold_a_point_each_and_are_json(tasks: dict[str, list[Problem]]) -> None:
    one = curves("ivf", tasks, k=50, values=[4, 8])["control"]
    records = json.loads(json.dumps(one.records()))
    assert [record["value"] for record in records] == [4, 8]
    for record, point in zip(records, one.points, strict=True):
        assert record["knob"] == "probes"
        assert record["selector"] == f"ivf:lists=0,probes={record['value']},seed=0"
        assert record["mean"]["recall"] == point.mean("recall")
        assert record["worst"]["recall"] == float(point.heads["recall"].min()) <= record["mean"]["recall"]
        assert record["worst"]["scanned_share"] == float(point.heads["scanned_share"].max())
        assert (record["k"], record["keys"], record["queries"]) == (50, KEYS, QUERIES)
        assert (record["layers"], record["heads"], record["group"], record["size"]) == ([0, 1], 2, 1, 32)
        assert record["index_bytes_per_key"] > 32 * 4, "its copy of the keys"


def test_a_trace_is_cut_into_keys_and_queries() -> None:
    trace = synthetic(120, heads=2, group=3, size=16, clusters=4)
    layer = trace.layer(0)
    asked = Problem.of(layer, trace.positions, 20, sink=4)
    assert torch.equal(asked.keys, layer.keys[:, 4:100])
    assert torch.equal(asked.queries, layer.query[:, :, 100:])
    assert asked.training is not None
    assert torch.equal(asked.training, layer.query[:, :, 4:100])
    assert asked.positions is not None
    assert asked.positions.tolist() == list(range(4, 120))
    control = Problem.of(layer, trace.positions, 20, sink=4, held_out=True)
    assert torch.equal(control.queries, layer.keys[:, None, 100:])
    assert control.training is not None
    assert torch.equal(control.training[:, 0], control.keys)
    few = synthetic(120, heads=2, group=3, size=16, clusters=4, queries=30)
    assert Problem.of(few.layer(0), few.positions, 20, sink=4).training is None
    assert torch.equal(Problem.of(few.layer(0), few.positions, 20).queries, few.layer(0).query[:, :, 10:])


def test_what_does_not_fit_is_refused(tasks: dict[str, list[Problem]]) -> None:
    keys, queries = torch.randn(2, 50, 8), torch.randn(2, 1, 3, 8)
    for wrong, words in (
        (lambda: Problem(keys[0], queries), "keys are \\[H,N,D\\]"),
        (lambda: Problem(keys, queries[:1]), "keys are \\[H,N,D\\]"),
        (lambda: Problem(keys, queries, keys[:, None, :9]), "one for each key"),
        (lambda: Problem(keys, queries, positions=torch.arange(9)), "positions are \\[N\\+Q\\] = \\[53\\]"),
        (lambda: Problem(keys, queries * torch.nan), "finite"),
        (lambda: curve("flat", keys, queries, k=51), "recall@51 needs at least 51 keys"),
        (lambda: curve("flat", keys, queries, k=0), "1 or more keys"),
        (lambda: curve("quest", keys, queries, k=49), "recall@49 needs"),
        (lambda: check(Quest(), 50, 8), "less than one span"),
        (lambda: curve("ivf", keys, queries, k=5, values=[0]), "1 or more"),
        (lambda: curve("ivf", keys, queries, k=5, values=[]), "1 or more"),
        (lambda: curve(5, keys, queries, k=5), "an instance of a Selector, such as Quest\\(\\), got 5"),
        (lambda: curve("iv", keys, queries, k=5), "did you mean 'ivf'"),
        (lambda: curves("flat", {}, k=5), "needs a task"),
        (lambda: curves("flat", {"a": []}, k=5), "needs a task"),
        (lambda: curves("flat", {"a": tasks["queries"], "b": [Problem(keys, queries)] * 2}, k=5), "same keys"),
        (lambda: curves("flat", {"a": tasks["queries"], "b": tasks["queries"][:1]}, k=5), "same keys"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


def test_progress_tells_what_is_done(tasks: dict[str, list[Problem]]) -> None:
    told: list[tuple[str, int, int]] = []
    curves("ivf", {"q": tasks["queries"]}, k=50, values=[4, 8], progress=lambda *what: told.append(what))
    assert told[:2] == [("build", 0, 2), ("build", 1, 2)]
    assert told[2:] == [(f"probes={value}", t, QUERIES) for value in (4, 8) for t in range(QUERIES)]
