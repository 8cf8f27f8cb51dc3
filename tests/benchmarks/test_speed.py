"""The benchmarks of a decode step: the ways do the same work, figures are what the clocks say, records are whole."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.cases import full, heads

pytest.importorskip("faiss")
pytest.importorskip("numba")

from benchmarks import dense, nearest, predicted, rounds, scaling, speed, step
from benchmarks.bench import Bench
from benchmarks.inputs import Inputs, Shape
from benchmarks.measure import Temporaries, Timer, spread
from benchmarks.methods import Method
from sparseattn import KVCache, Quest, Selection, Tail, decode, make_selector
from sparseattn.core.rope import Rope
from sparseattn.cost_model import measure
from sparseattn.cost_model.machine import Machine
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.utils.devices import features

TINY = (
    *("--heads", "2", "--group", "2", "--size", "16", "--device", "cpu", "--threads", "1", "--rounds", "2"),
    *("--seal", "32", "--window", "16", "--queries", "2", "--buckets", "8", "--hidden", "8", "--evict", "0"),
    *("--copy", "1"),
)
SPEED = (*TINY, "--rows", "600", "--dtype", "float32", "--cycles", "1", "--index-heads", "1")


def options(*more: str) -> argparse.Namespace:
    return speed.parser().parse_args([*SPEED, *more])


# -- what is timed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_dense_way_is_full_attention(dtype: torch.dtype) -> None:
    queries, keys, values = heads(2, 3, 4, 100, 16, dtype)
    store = torch.randn(2, 2, 3, 120, 16).to(dtype)  # with spare capacity, as a cache's
    store[0, :, :, :100], store[1, :, :, :100] = keys, values
    query = queries[:, :, :, -1]
    ways, absent = dense.ways(query, store[0, :, :, :100], store[1, :, :, :100])
    assert set(ways) == {"sdpa", "sdpa-gqa", "sdpa-repeat", "matmul", "bmm", "bmm-keys-first", dense.OURS}
    assert not absent
    for way in ways.values():
        other = torch.randn_like(query)
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(way(other).double(), full(other, keys, values), **close)


def test_a_way_that_is_wrong_or_fails_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(query: Any, keys: Any, values: Any) -> Any:
        raise RuntimeError("no kernel\nof this kind")

    made = {
        "wrong": lambda query, keys, values: lambda query: query * 0,
        "nan": lambda query, keys, values: lambda query: query * math.nan,
        "refusing": refusing,
    }
    monkeypatch.setattr(dense, "_known", lambda query, impl: made)
    queries, keys, values = heads(1, 1, 1, 20, 8)
    ways, absent = dense.ways(queries[:, :, :, -1], keys, values)
    assert not ways
    assert absent == {
        "wrong": "its output is off by 1",
        "nan": "its output is off by nan",
        "refusing": "RuntimeError: no kernel",
    }


def test_repeated_keys_that_have_no_room_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_free", lambda: 1000)
    queries, keys, values = heads(1, 1, 2, 20, 8)
    assert "free" in dense.ways(queries[:, :, :, -1], keys, values)[1]["sdpa-repeat"]


def test_inputs_are_turned_content_that_repeats() -> None:
    shape = Shape(2, 3, 2, 200, 16, "float32", "cpu")
    inputs = Inputs(shape, learned=True, distinct=64)
    keys, values = inputs.rows(0, 200)
    assert keys.shape == values.shape == (2, 3, 200, 16)
    later = inputs.rows(100, 140)
    assert torch.equal(later[0], keys[:, :, 100:140])
    assert torch.equal(later[1], values[:, :, 100:140])
    plain = Rope.of(16, 500_000.0).unrotate(keys, torch.arange(200))
    torch.testing.assert_close(plain[:, :, :64], plain[:, :, 64:128], rtol=1e-3, atol=1e-3)
    assert not torch.equal(keys[:, :, :64], keys[:, :, 64:128])
    assert torch.equal(values[1, :, : 64 - 997 % 64], values[0, :, 997 % 64 : 64])
    assert inputs.queries(150, 153).shape == (2, 3, 2, 3, 16)
    assert inputs.queries(200, 203).isfinite().all()
    longer = Inputs(Shape(1, 1, 1, 20000, 16, "float32", "cpu"), distinct=64)
    assert list(longer.chunks()) == [(0, 16384), (16384, 20000)]


def test_the_artefact_fits_the_shape(tmp_path: Path) -> None:
    shape = Shape(1, 10, 2, 300, 16, "bfloat16", "cpu")
    inputs = Inputs(shape)
    facts = inputs.artefact(tmp_path / "a.safetensors", buckets=8, hidden=12)
    assert (facts["buckets"], facts["hidden"]) == (8, 12)
    assert 1 <= facts["imbalance"] < 8
    partition = Artefact.load(tmp_path / "a.safetensors").check(0, 10, 2, 16, inputs.rope)
    assert partition.centroids.shape == (10, 8, 16)
    assert torch.equal(partition.centroids[0], partition.centroids[8])  # of the same content
    assert not torch.equal(partition.centroids[0], partition.centroids[1])
    sizes = torch.bincount(partition.assign(inputs.content[1][:1].float())[0], minlength=8)
    assert int(sizes.max()) <= 300 * facts["largest_share"] + 1


def test_bytes_of_a_step_count_a_row_once() -> None:
    """Two query heads that choose 5 rows each, 3 of them the same, read 7; sink and recent rows come on top."""
    cache = KVCache(make_selector("exact"), sink=2, window=4)
    cache.append(*torch.randn(2, 1, 1, 30, 8))
    cache.seal()
    ids = torch.tensor([[[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]])
    shape = Shape(1, 1, 2, 30, 8, "float32", "cpu")
    chosen = Selection.tokens(ids, scan_bytes=torch.tensor([[100]]))
    assert step.cost(cache, chosen, shape) == {"rows": 13.0, "rows_bytes": 13 * 2 * 8 * 4, "scan_bytes": 100}
    whole = Selection.pages(torch.tensor([[[0, 2]]]), 4)
    assert step.cost(cache, whole, shape) == {"rows": 14.0, "rows_bytes": 14 * 64, "scan_bytes": None}
    assert step.cost(cache, Selection.none(1, 1), shape)["rows"] == 6
    biased = Selection.pages(torch.tensor([[[0, 2, -1]]]), 4, bias=torch.zeros(1, 1, 3))
    tail = Tail(*torch.randn(2, 1, 1, 5, 8), Selection.tokens(torch.tensor([[[0], [0]]]), bias=torch.zeros(1, 2, 1)))
    found = step.cost(cache, biased, shape, tail)
    assert (found["rows"], found["rows_bytes"]) == (15.0, 15 * 64 + 2 * 4 + 2 * 4)


def test_figures() -> None:
    """By hand: dense is the fastest of others' ways; ratios are taken within the rounds, then the median."""
    taken = {
        "step": [1.0, 2.0, 4.0],
        "select": [0.5, 1.0, 2.0],
        "attend": [0.5, 0.5, 0.5],
        "dense:a": [8.0, 8.0, 8.0],
        "dense:b": [9.0, 9.0, 1.0],
        f"dense:{dense.OURS}": [0.1, 0.1, 0.1],
        "copy": [2.0, 2.0, 2.0],
        "read": [1.0, 1.0, 1.0],
    }
    costs = [{"rows": 10, "rows_bytes": 60, "scan_bytes": 40}] * 2
    one = rounds.figures(taken, costs, 800, {"copy": 200, "read": 100})
    assert one["dense"] == "a"
    assert [one["speed_up"][name] for name in ("median", "min", "max")] == [4.0, 2.0, 8.0]
    assert one["bandwidth_gb_s"] == {"copy": 0.0, "read": 0.0}  # 100 bytes a second
    assert (one["bound"], one["bound_seconds"]) == (8.0, 1.0)  # 800 / 100 bytes; 100 bytes at 100 a second
    assert one["share_of_bandwidth"] == 0.5
    assert one["share_of_bound"] == 0.5
    assert one["attend_share_of_bandwidth"] == 1.2
    assert one["dense_share_of_bandwidth"] == 1.0
    assert one["seconds"]["step"] == {"median": 2.0, "q25": 1.5, "q75": 3.0, "min": 1.0, "max": 4.0}
    unknown = rounds.figures(taken, [{"rows": 10, "rows_bytes": 60, "scan_bytes": None}], 800, {"copy": 1, "read": 1})
    assert "bound" not in unknown
    assert unknown["scan_bytes"] is None


def test_ways_take_turns() -> None:
    log: list[str] = []
    calls = {name: (lambda name=name: log.append(name)) for name in "abc"}
    query, asked = torch.zeros(1), [torch.ones(1), torch.full((1,), 2.0)]
    taken = rounds.rounds(calls, asked, query, Timer("cpu", 0), 2)
    assert "".join(log[-6:]) == "abcbca"
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 2, "b": 2, "c": 2}
    assert len(log) == 3 * (2 + rounds.WARM)
    assert float(query) == 2.0


def test_dense_ways_worth_rounds() -> None:
    looks = {"a": spread([1.0]), "b": spread([1.9]), "c": spread([2.1]), dense.OURS: spread([0.1])}
    assert rounds.in_rounds(looks) == ["a", "b", dense.OURS]
    with pytest.raises(RuntimeError, match="no way of dense attention runs"):
        rounds.in_rounds({dense.OURS: spread([0.1])})


def test_dense_reads_rows_of_its_own_without_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    known = dense.ways
    monkeypatch.setattr(dense, "ways", lambda *parts: given.append(parts) or known(*parts))
    inputs = Inputs(Shape(1, 2, 2, 200, 16, "float32", "cpu"))
    chosen = options()
    one = Bench(inputs, tmp_path, Timer("cpu", 0), rounds.Copy("cpu", 1), chosen)
    for spec in ("window", "quest"):
        cache = step.filled(Method(spec, 4, 16, 64), inputs, tmp_path, chosen).cache
        ways = one.dense_ways(one.asked()[0], cache)
    ((query, keys, values, _),) = given
    assert not cache.keys.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert torch.equal(keys, inputs.rows(0, 200)[0])
    for way in ways.values():
        torch.testing.assert_close(way(query).double(), full(query, keys, values), rtol=1e-4, atol=1e-5)


def test_launches_in_order() -> None:
    events = [("k2", 5.0, 6.0), ("k1", 0.0, 3.0), ("k1", 10.0, 11.0), ("k2", 15.0, 19.0)]
    assert step.launches(events, 2) == [{"name": "k1", "us": 2.0}, {"name": "k2", "us": 2.5}]
    with pytest.raises(ValueError, match="3 launches are not 2 equal steps"):
        step.launches(events[:3], 2)
    with pytest.raises(ValueError, match="4 launches are not 2 equal steps"):
        step.launches([*events[:3], ("k3", 15.0, 19.0)], 2)
    names = ("score_rows", "void at::native::sbtopk::gatherTopK<float>()", "radixSortKVInPlace", "attend_split")
    spent = step.by_purpose({"name": name, "us": 2.0**i} for i, name in enumerate(names))
    assert spent == {"attending": 8.0, "best": 6.0, "scoring": 1.0}


def test_the_timer_writes_before_each_call() -> None:
    timer = Timer("cpu", 1 << 16)
    timer._other.zero_()
    seen: list[int] = []
    assert timer(lambda: seen.append(int(timer._other.sum()))) > 0
    assert seen == [1 << 16]


def test_temporaries_are_those_that_live_at_once() -> None:
    held = torch.zeros(1000)
    with Temporaries() as made:
        a = held + 1
        b = a * 2
        del a
        c = b + 1
        d = c.view(10, 100)[:5]
        held.add_(1)
    assert made.peak == 8000, "two of 4,000 bytes; views, writes in place and what was there before make none"
    assert d.sum() != 0


def test_appending_counts_its_seals(tmp_path: Path) -> None:
    inputs = Inputs(Shape(1, 2, 2, 200, 16, "float32", "cpu"))
    chosen = options("--cycles", "3")
    cache = step.filled(Method("quest", 4, 16, 64), inputs, tmp_path, chosen).cache
    assert int(cache.sealed[0]) == (200 - 4 - 16) // 16 * 16
    one = step.appending(cache, inputs, 1.0, chosen)
    assert (one["seals"], one["tokens"]) == (3, 3 * 32 - (200 - 4 - 16) % 16)
    assert int(cache.sealed[0]) == (200 - 4 - 16) // 16 * 16 + 3 * 32
    assert one["seconds_per_token"] == pytest.approx(one["share_of_step"], abs=1e-4)
    assert one["longest_pause_seconds"] >= one["seal_seconds"]["max"] * 0.999
    expected, _ = inputs.rows(0, int(cache.lengths[0]))
    torch.testing.assert_close(cache.keys, expected)  # and the rows appended are the inputs' own


# -- the commands ------------------------------------------------------------------------------------------------------


def test_the_record_of_a_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paper = "retrieval:degree=4,neighbours=8@sink=8,window=32,budget=20"
    chosen = ("quest", "saap", "window", "bridge:probes=2,neighbours=8,share=0.5", paper)
    named = [part for spec in chosen for part in ("--selector", spec)]
    speed.main([*SPEED, *named, "--budget", "64", "--results", str(tmp_path), "--json"])
    record = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "speed-cpu.json").read_text()) == record
    assert record["complete"]
    assert record["versions"]["torch"]
    assert record["machine"]["cores"]
    assert record["features"] == features()
    assert (record["device"], record["dtype"], record["evict_mib"]) == ("cpu", ["float32"], 0)
    wide, narrow = record["results"]
    assert (wide["heads"], wide["rows"], wide["size"], wide["dtype"]) == (2, 600, 16, "float32")
    assert narrow["heads"] == 1
    assert wide["artefact"]["buckets"] == 8
    assert [one["selector"] for one in wide["selectors"]] == list(chosen[:3])
    assert [one["selector"] for one in narrow["selectors"]] == [spec.partition("@")[0] for spec in chosen[3:]]
    for result in record["results"]:
        assert set(result["dense_first_look_seconds"]) | set(result["dense_absent"]) == {
            *("sdpa", "sdpa-gqa", "sdpa-repeat", "matmul", "bmm", "bmm-keys-first", dense.OURS)
        }
        for one in result["selectors"]:
            assert {"step", "select", "attend", "copy", "read", f"dense:{one['dense']}"} <= set(one["seconds"])
            assert all(times["median"] > 0 for times in one["seconds"].values())
            assert one["dense_bytes"] == result["heads"] * 600 * 2 * 16 * 4
            must = one["rows_bytes"] + one["scan_bytes"]
            assert one["bound"] == pytest.approx(one["dense_bytes"] / must, rel=1e-3)
            assert one["rows_bytes"] == pytest.approx(one["rows_read"] * result["heads"] * 2 * 16 * 4, rel=1e-2)
            assert one["append"]["seals"] == 1
            assert one["append"]["share_of_step"] > 0
            assert one["prefill_seconds"]["store"]["wall"] > 0
            assert one["prefill_seconds"]["index"]["wall"] > 0
            assert one["memory"]["bytes"]["kv"] == result["heads"] * 600 * 2 * 16 * 4
            assert one["memory"]["bytes"]["workspace"] > 0
            assert one["memory"]["bytes_per_1k_tokens"]["kv"] == result["heads"] * 1000 * 2 * 16 * 4
    quest = wide["selectors"][0]
    recent = (600 - 4 - 16) % 16
    assert quest["rows_read"] == 4 + 16 + recent + 64
    assert quest["scan_bytes"] == 2 * (580 // 16) * 2 * 16 * 4
    assert narrow["selectors"][1]["sink"] == 8
    assert narrow["selectors"][1]["budget"] == 20
    titles = [table.title for table in speed.tables(record)]
    assert len(titles) == 6
    assert str(titles[0]).startswith("600 rows, 1 x 2 KV heads, G 2, D 16, float32, cpu")


def test_the_record_of_scaling_and_what_was_predicted_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(measure, "EVICTED", 1 << 10)  # times mean nothing here
    monkeypatch.setattr(measure, "SWEPT", 1 << 20)
    monkeypatch.setattr(measure, "last_cache", lambda device: 1 << 10)
    sizes = ("--rows-sizes", "300,600,100000000", "--batch-sizes", "1,3", "--budget-sizes", "32,64", "--rows", "300")
    arguments = [*TINY, *sizes, "--batch-rows", "300", "--budget", "64", "--dtype", "float32", "--memory", "0.01"]
    profile = tmp_path / "mine.json"
    arguments += ["--machine", str(profile)]
    scaling.main([*arguments, "--results", str(tmp_path), "--out", str(tmp_path / "s.png"), "--json"])
    record = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "scaling-cpu.json").read_text()) == record
    assert record["complete"]
    assert record["machine"]["cores"]
    assert record["features"] == features()
    assert record["versions"]["torch"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    sweeps = record["sweeps"]
    assert list(sweeps) == ["rows", "batch", "budget"]
    assert sweeps["rows"]["left_out"] == [100000000]
    at = {name: [(one["selector"], one["at"]) for one in sweep["points"]] for name, sweep in sweeps.items()}
    assert sorted(at["rows"]) == [("quest", 300), ("quest", 600), ("saap", 300), ("saap", 600)]
    assert sorted(at["batch"]) == [("quest", 1), ("quest", 3), ("saap", 1), ("saap", 3)]
    assert sorted(at["budget"]) == [("quest", 32), ("quest", 64), ("saap", 32), ("saap", 64)]
    for sweep in sweeps.values():
        assert set(sweep["slopes"]) == {"quest", "saap"}
        for parts in sweep["slopes"].values():
            assert set(parts) == set(scaling.PARTS)
            assert all(isinstance(value, float) for value in parts.values())
    assert {(one["batch"], one["rows"]) for one in sweeps["batch"]["points"]} == {(1, 300), (3, 300)}
    assert {one["budget"] for one in sweeps["budget"]["points"]} == {32, 64}
    assert len(scaling.tables(record)) == 3
    machine = Machine.load(profile)
    assert machine.about["shape"] == {name: record[name] for name in ("heads", "group", "size")}
    assert machine.about["rounds"] >= scaling.LEAST
    assert set(machine.speeds) == {"float32"}
    judge = ["--machine", str(profile), "--results", str(tmp_path)]
    predicted.main([*judge, "--json"])
    judged = json.loads(capsys.readouterr().out)
    assert sum(one["points"] for name, one in judged["summary"].items() if name != "dense") == 12
    for point in judged["points"]:
        if point["selector"] == "quest":
            assert point["bytes"]["measured"] == point["bytes"]["predicted"]
        assert point["error"]["step"] == pytest.approx(
            point["predicted"]["step"] / point["measured"]["step"] - 1, abs=1e-3
        )
    assert len(predicted.tables(judged)) == 2
    for sweep in sweeps.values():
        for point in sweep["points"]:
            point.pop("artefact", None)
    (tmp_path / "scaling-cpu.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit):
        predicted.main(judge)
    assert "does not say how many buckets saap has" in " ".join(capsys.readouterr().err.split())


def test_the_record_of_nearest(tmp_path: Path) -> None:
    said: list[str] = []
    sizes = ("--rows", "300", "--queries", "20", "--size", "16", "--count", "5", "--repeats", "2", "--device", "cpu")
    nearest.main([*sizes, "--results", str(tmp_path)], said.append)
    record = json.loads((tmp_path / "nearest-cpu.json").read_text())
    assert (record["rows"], record["size"], record["dtype"]) == (300, 16, "float32")
    assert record["machine"]["cores"]
    assert record["features"] == features()
    assert record["versions"]["torch"]
    (way,) = record["ways"].values()
    assert way["same"] == 1
    assert way["seconds"]["median"] > 0
    assert said[0] == f"faiss on the GPU: {record['faiss_gpu']}"


def test_slopes() -> None:
    assert scaling.slope([1, 10, 100], [2.0, 2.0, 2.0]) == 0.0
    assert scaling.slope([1, 2, 4, 8], [3.0, 6.0, 12.0, 24.0]) == 1.0
    assert scaling.slope([1, 4, 16], [1.0, 2.0, 4.0]) == 0.5
    assert scaling.slope([4, 4], [1.0, 2.0]) is None


def test_all_points_of_a_sweep_have_the_heads_that_fit_at_the_largest() -> None:
    given = argparse.Namespace(
        heads=8, group=4, size=64, dtype="float32", device="cpu", rows=1024, batch_rows=1024, memory=1.0
    )
    head = 2 * 64 * 4  # bytes of a row
    given.rows_sizes = [1024, 2**30 // head // 3, 2**30 // head // 1, 2**30]
    chosen, left = scaling.points(given, "rows")
    assert left == [2**30]
    assert [(size, shape.rows, shape.heads) for size, shape, _ in chosen] == [
        (size, size, 1) for size in given.rows_sizes[:3]
    ]
    given.rows_sizes = given.rows_sizes[:2]
    assert {shape.heads for _, shape, _ in scaling.points(given, "rows")[0]} == {3}
    given.batch_sizes, given.budget_sizes = [1, 2], [32, 64]
    assert [(shape.batch, shape.heads) for _, shape, _ in scaling.points(given, "batch")[0]] == [(1, 8), (2, 8)]
    assert [(shape.rows, budget) for _, shape, budget in scaling.points(given, "budget")[0]] == [(1024, 32), (1024, 64)]


def test_what_is_measured_by_default() -> None:
    everything = [method.spec for method in speed.settle(options("--rows", "2000"))]
    assert [text.partition("@")[0] for text in speed.SELECTED] == everything
    quick = [method.spec for method in speed.settle(options("--rows", "2000", "--quick"))]
    assert set(everything) - set(quick) == {"bridge:share=0.25", "retrieval:share=0.25"}
    paper = Method.of(speed.PAPER, options())
    assert (paper.sink, paper.window, paper.budget) == (128, 512, 100)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--rows 16k", "--rows takes integers separated by commas, got '16k'"),
        ("--rows 0", "--rows is 1 or more, got 0"),
        ("--batch 0,2", "--batch is 1 or more, got 0"),
        ("--rounds 0", "--rounds is 1 or more, got 0"),
        ("--cycles -1", "--cycles is 0 or more, got -1"),
        ("--index-heads 0", "--index-heads is 1 or more, got 0"),
        ("--dtype int8", "--dtype is one of float32, float16, bfloat16, got 'int8'"),
        ("--budget none", 'a budget is rows ("64"), a mass ("mass:0.95"), a share ("1%") or "all", got \'none\''),
        ("--selector qwest", "did you mean 'quest'?"),
        ("--selector quest@sinks=4", "behind @ come sink, window, budget and rows as name=value, got 'sinks=4'"),
        ("--selector quest@sink=four", "sink and window are numbers of rows, got 'four'"),
        ("--rows 20 --selector window", "a sink of 4 and a window of 16 leave less than a unit of 1 of 20 rows"),
        ("--budget 8 --selector quest", "less than one span"),
        ("--seal 8 --selector quest", "seal is at least the unit of"),
        ("--impl fast", "--impl is one of reference, gather"),
        ("--rows 100000000000 --selector window", "100000000000 rows of 1 x 2 KV heads take"),
        ("--device nowhere", "device nowhere is not a torch device, such as cpu or cuda"),
        ("--device meta", "device meta holds shapes without numbers"),
    ],
)
def test_what_it_refuses(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        speed.main([*SPEED, *arguments.split(), "--results", str(tmp_path / "none")])
    assert error.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("speed", "a sweep is one of rows, batch, budget, got 'speed'"),
        ("--rows-sizes 0,5", "--rows-sizes is 1 or more, got 0"),
        ("--memory 0", "--memory is more than 0 GiB, got 0"),
        ("--dtype int8", "--dtype is one of float32, float16, bfloat16, got 'int8'"),
        ("--budget-sizes 8,64", "a budget of 8 rows is less than one span of quest"),
        ("--rows-sizes 20", "leave less than a unit of 16 of 20 rows to select (quest)"),
    ],
)
def test_what_scaling_refuses(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as error:
        scaling.main([*TINY, *arguments.split(), "--results", str(tmp_path / "none")])
    assert error.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


def test_a_step_is_what_decode_gives() -> None:
    cache = KVCache(Quest(), sink=4, window=16)
    queries, keys, values = heads(1, 2, 2, 300, 16)
    cache.append(keys, values)
    query = queries[:, :, :, -1].clone()
    calls = step.Calls(cache, query, 64, None, False).named({"own": lambda query: query})
    assert set(calls) == {"step", "select", "attend", "dense:own"}
    torch.testing.assert_close(calls["step"](), decode(query, cache, 64))
    torch.testing.assert_close(calls["attend"](), decode(query, cache, 64))
    assert calls["dense:own"]() is query


@pytest.mark.slow
def test_gpu_sh(tmp_path: Path) -> None:
    """Without a GPU it says so; its parts end in time; every command of a rehearsal is one that runs."""
    script = ROOT / "benchmarks" / "gpu.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    listed = subprocess.run([script, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    limits = [int(line.split()[0]) for line in listed]
    assert sum(limits) < 480
    names = ["tests", "kernels", "nearest", "speed", "codes", "batch", "head", "scaling", "training", "generate"]
    assert [line.split()[1] for line in listed] == names
    if not torch.cuda.is_available():
        alone = subprocess.run([script], capture_output=True, text=True, check=False, env={**os.environ})
        assert alone.returncode == 2
        assert "torch sees no CUDA device here" in alone.stderr
