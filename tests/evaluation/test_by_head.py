"""Where methods fail: by layer, at equal rows and bytes, and at which heads; what `bench --by-layer` shows of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sparseattn import Exact, Quest
from sparseattn.cli.app import app
from sparseattn.evaluation.by_head import NothingToCompare, at_bytes, at_rows
from sparseattn.evaluation.rank_correlation import rank_correlation
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.result import Evaluation
from sparseattn.reporting import layer_tables
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace

nan = float("nan")


def measured(
    label: str, budget: int, read: float, recovered: list[list[float]], scanned: float = 0.1, attended: int = 0
) -> Evaluation:
    found = torch.tensor(recovered, dtype=torch.float64)
    shares = {"bytes_share": read, "attended": float(attended or 10 + budget), "scanned_share": scanned}
    heads = {name: torch.full_like(found, value) for name, value in shares.items()}
    heads |= {"recovered": found, "relative_error": 1 - found}
    facts = {"tokens": 300, "last": 4, "sink": 2, "window": 8, "seal": 1}
    return Evaluation("trace", f"{label}()", label, budget, facts, (3, 7), heads)


RESULTS = [
    measured("Oracle", 16, 0.6, [[0.9, 0.8], [0.9, 0.4]], scanned=1.0),
    measured("Oracle", 32, 0.7, [[1.0, 0.9], [1.0, 0.6]], scanned=1.0),
    measured("A", 16, 0.1, [[0.2, 0.4], [0.6, 0.8]]),
    measured("A", 32, 0.3, [[0.4, 0.4], [0.8, 1.0]]),
    measured("B", 16, 0.05, [[0.3, 0.1], [0.1, 0.8]]),
    measured("B", 32, 0.08, [[0.5, 0.2], [0.1, 0.9]]),
    measured("Silent", 16, nan, [[0.5, 0.5], [0.5, 0.5]], scanned=nan),
    measured("Silent", 32, nan, [[0.5, 0.5], [0.5, 0.5]], scanned=nan),
    measured("window", 16, 0.01, [[0.0, 0.0], [0.0, 0.0]], scanned=0.0, attended=10),
]


def test_ranks_correlate_as_scipy_says() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = torch.randn(2, 3, 40, dtype=torch.float64)
    for x, y in ((a, b), (a.round(), (b + a).round())):  # rounded, many are equal
        expected = [stats.spearmanr(*pair).statistic for pair in zip(x.numpy(), y.numpy(), strict=True)]
        assert rank_correlation(x, y).tolist() == pytest.approx(expected)
    assert rank_correlation(a, torch.zeros_like(a)).isnan().all(), "a constant has no order"


def test_equal_bytes_are_a_mixture_of_two_measured_neighbours() -> None:
    one = at_bytes(RESULTS, 0.15)
    assert list(one.readings) == ["A", "B", "window"]
    a, b = one.readings["A"], one.readings["B"]
    assert a.budgets == (16, 32)
    assert a.part == pytest.approx(0.25)
    assert a.mean("bytes_share") == pytest.approx(0.15)
    assert a.heads("recovered").flatten().tolist() == pytest.approx([0.25, 0.4, 0.65, 0.85])
    assert a.layers("relative_error").tolist() == pytest.approx([1 - 0.325, 1 - 0.75])
    assert b.budgets == (32,), "reads less at every budget: nothing is extrapolated"
    assert b.mean("bytes_share") == pytest.approx(0.08)
    assert one.left_out == {"Oracle": "reads 60.0% at least", "Silent": "does not say what it reads"}
    assert at_bytes(RESULTS, 0.1).readings["A"].budgets == (16,), "measured there"
    with pytest.raises(NothingToCompare, match=r"at 0.5% of the cache's bytes or less: Oracle reads 60.0% at least, A"):
        at_bytes(RESULTS, 0.005)


def test_equal_rows_and_which_heads_fail() -> None:
    one = at_rows(RESULTS, 32)
    assert list(one.readings) == ["Oracle", "A", "B", "Silent", "window"], "the window has no budget"
    assert one.rivals == ["A", "B", "Silent", "window"]
    assert one.count() == 4
    assert one.missed().tolist() == [
        [0, 0, 0, 0, 0],
        [0, 2, 1, 0, 2],
        [0, 1, 2, 0, 2],
        [0, 0, 0, 0, 0],
        [0, 2, 2, 0, 4],
    ]
    assert one.wins() == {"A": 2, "B": 1, "Silent": 2, "window": 0}, "two have the first head"
    assert one.winners() == {3: "Silent", 7: "A"}
    found = [one.readings[label].heads("recovered").flatten() for label in ("A", "B")]
    assert float(one.correlation()[1, 2]) == pytest.approx(float(rank_correlation(*found)))
    with pytest.raises(NothingToCompare, match="nothing was measured at the budget 64"):
        at_rows(RESULTS, 64)


def test_equal_rows_are_those_attended_and_not_the_budget() -> None:
    """Sink, window and 32 rows are 42: who attends fewer at this budget, or more, is mixed; no one is flattered."""
    found = [
        measured("exact", 16, 0.1, [[0.2, 0.2], [0.2, 0.2]]),
        measured("exact", 32, 0.2, [[0.4, 0.4], [0.4, 0.4]]),
        measured("Few", 32, 0.1, [[0.2, 0.4], [0.6, 0.8]], attended=30),
        measured("Few", 64, 0.1, [[0.6, 0.8], [0.6, 1.0]], attended=46),
        measured("Fewest", 32, 0.1, [[0.2, 0.4], [0.6, 0.8]], attended=20),
        measured("Near", 32, 0.1, [[0.2, 0.4], [0.6, 0.8]], attended=44),
        measured("Many", 16, 0.1, [[0.2, 0.4], [0.6, 0.8]], attended=45),
    ]
    one = at_rows(found, 32)
    assert (one.attended, one.record()["attended"]) == (42, 42)
    assert {label: reading.mean("attended") for label, reading in one.readings.items()} == {
        "exact": 42,
        "Few": pytest.approx(42),
        "Fewest": 20,
        "Near": 44,
    }
    assert one.readings["exact"].budgets == (32,)
    assert one.readings["Few"].budgets == (32, 64)
    assert one.readings["Few"].heads("recovered").flatten().tolist() == pytest.approx([0.5, 0.7, 0.6, 0.95])
    assert one.left_out == {"Many": "attends 45 rows at least"}
    assert layer_tables.condition(one) == "42 tokens attended (budget 32)"
    with pytest.raises(NothingToCompare, match="no method attends 26 rows or fewer: Many attends 45 rows at least"):
        at_rows(found[-1:], 16)


def test_equal_rows_are_those_of_the_steps_that_were_measured() -> None:
    trace = synthetic(300, heads=2, group=2, size=32, layers=2, clusters=8)
    results = [
        evaluate(trace, selector, budget, last=16, every=8, sink=4, window=16)
        for selector in (Exact(), Quest())
        for budget in (16, 64, None)
    ]
    one = at_rows(results, None)
    assert one.attended == (292 + 300) / 2
    assert [reading.budgets for reading in one.readings.values()] == [(None,), (None,)]


def test_heads_that_were_left_out_count_nowhere() -> None:
    far = [measured(name, 16, 0.1, [[0.2, nan], [nan, nan]]) for name in "AB"]
    one = at_rows(far, 16)
    assert (one.count(), one.missed().tolist(), one.wins()) == (1, [[1, 1], [1, 1]], {"A": 1, "B": 1})
    assert one.winners() == {3: "A"}
    far = [measured(name, 16, 0.1, [[0.2, 0.4, nan], [nan, nan, last]]) for name, last in (("A", 0.1), ("B", 0.5))]
    assert at_rows(far, 16).correlation()[0, 1].item() == pytest.approx(-0.5)
    record = json.loads(json.dumps(one.record()))
    assert record["methods"][0]["recovered"] == [0.2, None]


def test_sentences_say_who_fails_where() -> None:
    said = " ".join(layer_tables.sentences(at_rows(RESULTS, 32)))
    assert "42 tokens attended (budget 32): A recovers less than 50% in 2 of 4 heads" in said
    assert "in 2 of 4 heads. Of these heads, other methods miss: Oracle 0, B 1," in said
    assert "those that do not score every key: A in 2 and in layers 7; Silent in 2 and in layers 3; B in 1." in said
    near = [measured("Near", 32, 0.5, [[0.9, 0.9], [0.9, 0.9]], scanned=0.4), *RESULTS]
    said = " ".join(layer_tables.sentences(at_rows(near, 32)))
    assert "in 2 of 4 heads. Of these heads, other methods miss: Near 0, Oracle 0, B 1," in said
    said = " ".join(layer_tables.left_out(at_bytes(RESULTS, 0.15), {}))
    assert "15% of the cache's bytes: Oracle reads 60.0% at least." in said


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.safetensors"
    synthetic(300, heads=2, group=2, size=32, layers=2, clusters=8).save(path)
    return path


def run(trace: Path, out: Path, *more: str) -> Result:
    small = ["--budget", "16,32", "--sink", "2", "--window", "8", "--last", "4", "--out", str(out)]
    return CliRunner().invoke(app, ["bench", str(trace), *small, *more])


METHODS = ("--selector", "quest", "--selector", "random", "--selector", "exact")


def test_bench_by_layer_is_what_the_library_measures(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    done = run(trace, tmp_path, *METHODS, "--by-layer", "--rows", "32", "--bytes", "20%")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "small, 42 tokens attended (budget 32): share of the attention on indexed tokens that is recovered" in text
    assert "small, 20% of the cache's bytes: exact reads 6" in text
    assert "16+32" in text
    assert {path.name for path in tmp_path.iterdir()} == {
        *("bench.jsonl", "by-layer.jsonl"),
        *("frontier-small.png", "by-layer-small.png", "heads-small.png"),
    }
    rows, read = (json.loads(line) for line in (tmp_path / "by-layer.jsonl").read_text().splitlines())
    low, high = (evaluate(Trace.open(trace), "quest", budget, sink=2, window=8, last=4) for budget in (16, 32))
    part = (42 - low.mean("attended")) / (high.mean("attended") - low.mean("attended"))
    same = low.heads["recovered"] + part * (high.heads["recovered"] - low.heads["recovered"])
    assert (rows["equal"], rows["at"], read["equal"], read["at"]) == ("rows", 32, "bytes", 0.2)
    quest = rows["methods"][0]
    assert quest["recovered"] == pytest.approx(same.mean(1).tolist())
    assert {round(one["mean"]["attended"], 6) for one in rows["methods"]} == {42}
    assert (quest["budgets"], quest["part"]) == ([16, 32], pytest.approx(part))
    assert [one["label"] for one in read["methods"]] == ["quest", "random"]
    quest, random = read["methods"]
    assert (quest["budgets"], quest["mean"]["bytes_share"]) == ([16, 32], pytest.approx(0.2))
    assert random["budgets"] == [32]
    assert random["mean"]["bytes_share"] < 0.2, "no budget of it reads as much"
    assert rows["trace_meta"]["model"] == "synthetic"
    assert rows["versions"]["torch"]
    _, by_layer, heads = drawn
    for axis, record in zip(by_layer.axes, (rows, read), strict=True):
        assert [line.get_label() for line in axis.lines] == [one["label"] for one in record["methods"]]
        for line, one in zip(axis.lines, record["methods"], strict=True):
            assert list(line.get_xdata()) == record["layers"]
            assert list(line.get_ydata()) == one["recovered"]
    cells = [[float(text.get_text()) for text in axis.texts] for axis in heads.axes[:2]]
    for drawn_cells, record in zip(cells, (rows, read), strict=True):
        ranks = [value for row in record["spearman"]["recovered"] for value in row]
        assert drawn_cells == pytest.approx(ranks, abs=0.0051)


def test_bench_by_layer_where_nothing_reads_so_little_and_as_json(trace: Path, tmp_path: Path) -> None:
    done = run(trace, tmp_path, "--selector", "exact", "--by-layer", "--json", "--no-figures")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one.get("equal") for one in records] == [None, None, "rows"]
    assert records[2]["at"] == 32, "the middle one, as 256 was not measured"
    assert "small: no method was measured at 10.0% of the cache's bytes or less" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--by-step", "recall@10,lookup_hits"), "step by step is recall@1, recall@10, recall@100, mass,"),
        (("--by-layer", "--rows", "64"), "--rows is one of the budgets of --budget, 16, 32, got 64"),
        (("--by-layer", "--bytes", "10"), "--bytes is a share of the cache's bytes, such as 10%, got 10"),
        (("--by-layer", "--bytes", "many"), "--bytes is a share of the cache's bytes, such as 10%, got many"),
    ],
)
def test_what_by_layer_refuses(trace: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = run(trace, tmp_path / "out", *METHODS, *arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()
