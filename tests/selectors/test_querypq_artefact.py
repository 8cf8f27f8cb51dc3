"""QueryPQ by a file of `sparseattn train --method querypq`: what it codes by, what is written, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from sparseattn import KVCache, QueryPQ, evaluate, make_selector
from sparseattn.cli.app import app
from sparseattn.core.context import LayerContext
from sparseattn.selectors.parameters.channel_calibration import Calibration, CalibrationError
from sparseattn.selectors.parameters.query_metric import as_coded, metric_of
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import CodesRecipe, TrainingError, query_codes, train_codes
from sparseattn.training.learned_index import DrawnQueries, ProductBooks
from tests.cases import rows_missed

SIZE, NAMES = 16, ("centre", "turn", "back", "centroids")
MEANS = ("plain", "rope")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two prompts of one "model" of two layers."""
    folder, files = tmp_path_factory.mktemp("traces"), []
    for number in range(2):
        made = synthetic(500, 2, 2, SIZE, layers=2, clusters=16, rope=True, seed=number)
        known = {"model": "toy", "config_hash": "c0", "tokens_sha256": f"prompt {number}"}
        files.append(folder / f"{number}.safetensors")
        Trace.build([made.layer(i) for i in made.layers], made.positions, known, f"p{number}").save(files[-1])
    return files


@pytest.fixture(scope="module")
def trained(traces: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trained") / "codes.safetensors"
    train_codes(traces, file, CodesRecipe(4, ahead=0))
    return file


def filled(selector: QueryPQ, trace: Trace, layer: int = 1, queries: bool = True, rows: int = 500) -> KVCache:
    shown = trace.layer(layer)
    cache = KVCache(selector.for_layer(LayerContext(layer, rope=shown.rope)), sink=0, window=0, seal=20)
    asked = shown.query[None, :, :, :rows] if queries else None
    cache.append(shown.keys[None, :, :rows], shown.values[None, :, :rows], asked)
    cache.seal()
    return cache


def parameters(cache: KVCache) -> dict[str, Tensor]:
    names = (*NAMES, "root") if cache.selector.turning else NAMES
    return {name: getattr(cache.selector, name).data[0].float() for name in names}


@pytest.mark.parametrize("mean", MEANS)
def test_coding_with_a_file_is_coding_with_the_same_books_learned_here(
    traces: list[Path], tmp_path: Path, mean: str
) -> None:
    trace, file = Trace.open(traces[0]), tmp_path / "own.safetensors"
    own = filled(QueryPQ(4, share=1.0, mean=mean, missed=0.0), trace)
    Calibration("querypq", {1: parameters(own)}, ropes={1: trace.ropes[1]}).save(file)
    named = QueryPQ(4, artefact=str(file))
    assert not named.learns
    assert named.turning == (mean == "rope")
    assert str(named) == f"querypq:subspaces=4,artefact={file}"
    filed = filled(named, trace, queries=False)
    assert torch.equal(own.selector.codes.data, filed.selector.codes.data)
    query = trace.layer(1).query[None, :, :, -1]
    chosen = [cache.select(query, 30) for cache in (own, filed)]
    assert torch.equal(*(one.rows for one in chosen))
    assert torch.equal(*(one.scan_bytes for one in chosen))


def test_codes_that_look_ahead_hold_for_positions_behind_the_prompts(tmp_path: Path) -> None:
    """Keys of a common part, which RoPE turns on: what books of 500 positions lose of the same keys 1,500 further."""
    made = synthetic(500, 2, 2, SIZE, layers=1, clusters=16, rope=True, seed=3)
    layer, rope = made.layer(0), made.ropes[0]
    plain = 4.0 + torch.randn(2, 500, SIZE, generator=torch.Generator().manual_seed(0))
    keys, later = rope.rotate(plain, made.positions), rope.rotate(plain, made.positions + 1500)
    known = {"model": "toy", "config_hash": "c0", "tokens_sha256": "prompt"}
    Trace.build([replace(layer, keys=keys)], made.positions, known, "p").save(tmp_path / "trace.safetensors")
    lost = {}
    for ahead in (0, 4096):
        file = tmp_path / f"{ahead}.safetensors"
        train_codes([tmp_path / "trace.safetensors"], file, CodesRecipe(4, ahead=ahead, mean="plain"))
        codes = Calibration.load(file).layers[0]
        turned = (later - codes["centre"][:, None]) @ codes["turn"].mT
        lost[ahead] = float((turned - as_coded(turned, codes["centroids"].float())).square().mean())
    assert lost[4096] < 0.5 * lost[0], lost


@pytest.mark.parametrize("mean", MEANS)
def test_one_prompt_of_which_all_is_taken_teaches_what_it_teaches_its_own_cache(
    traces: list[Path], tmp_path: Path, mean: str
) -> None:
    file = tmp_path / "one.safetensors"
    train_codes(traces[:1], file, CodesRecipe(4, ahead=0, mean=mean), layers=[1])
    trace = Trace.open(traces[0])
    own = parameters(filled(QueryPQ(4, sample=0, share=1.0, ahead=0, mean=mean), trace))
    found = parameters(filled(QueryPQ(4, artefact=str(file)), trace, queries=False))
    for name in own:
        torch.testing.assert_close(found[name], own[name], rtol=1e-3, atol=1e-3)


def test_books_of_two_prompts_are_of_rows_and_queries_of_both(traces: list[Path], trained: Path) -> None:
    """The mean before RoPE too, without which a key's centre is that of what is left."""
    layers, made = [Trace.open(path).layer(0) for path in traces], Calibration.load(trained)
    keys, queries = torch.cat([one.keys for one in layers], 1), torch.cat([one.query for one in layers], 2)
    codes, at = made.layers[0], Trace.open(traces[0]).positions.repeat(2)
    rope = made.ropes[0]
    torch.testing.assert_close(codes["root"], rope.unrotate(keys, at).mean(1), rtol=1e-4, atol=1e-4)
    keys = keys - rope.rotate(codes["root"][:, None].expand(keys.shape), at)
    torch.testing.assert_close(codes["centre"], keys.mean(1), rtol=1e-4, atol=1e-4)
    moment = (codes["turn"].mT @ codes["turn"]).double()  # the metric itself: the rotation drops out
    torch.testing.assert_close(moment, metric_of(queries), rtol=1e-3, atol=1e-3)
    assert {prompt["name"] for prompt in made.meta["prompts"]} == {"0", "1"}


def test_rows_sealed_later_and_an_index_file_are_coded_by_the_file(
    traces: list[Path], trained: Path, tmp_path: Path
) -> None:
    trace, shown = Trace.open(traces[1]), Trace.open(traces[1]).layer(0)
    whole = filled(QueryPQ(4, artefact=str(trained)), trace, 0)
    parts = filled(QueryPQ(4, artefact=str(trained)), trace, 0, rows=60)
    for first in range(60, 500, 110):
        parts.append(shown.keys[None, :, first : first + 110], shown.values[None, :, first : first + 110])
        parts.seal()
    assert torch.equal(whole.selector.codes.data, parts.selector.codes.data)
    chosen = []
    for file in (trained, shutil.copy(trained, tmp_path / "moved.safetensors")):
        selector = QueryPQ(4, artefact=str(file)).for_layer(LayerContext(0, rope=shown.rope))
        cache = KVCache(selector, sink=0, window=0, seal=20, indexes=tmp_path / "indexes")
        cache.append(shown.keys[None], shown.values[None])
        cache.seal()
        chosen.append(cache.select(shown.query[None, :, :, -1], 30).rows)
    assert torch.equal(*chosen)
    (file,) = (tmp_path / "indexes").iterdir()
    assert file.name.startswith("querypq-")


def test_rows_that_a_files_codes_miss_are_ranked_nearly_by_their_keys(traces: list[Path], trained: Path) -> None:
    trace = Trace.open(traces[1])
    shown, cache = trace.layer(0), filled(QueryPQ(4, artefact=str(trained), missed=0.1), trace, 0, queries=False)
    query, far = shown.query[None, :, :, -1].float(), rows_missed(cache.selector, 500)
    found = cache.selector.logits(query, torch.ones(1, 500, dtype=torch.bool))
    off = (found - query @ shown.keys[None].float().mT / 4).abs()
    assert far.sum(2).tolist() == [[50, 50]]
    marked = far[:, :, None].expand_as(off)
    assert float(off[marked].mean()) < 0.2 * float(off[~marked].mean())


def test_what_is_distilled_are_the_logits_of_the_codes(traces: list[Path], trained: Path) -> None:
    shown, made = Trace.open(traces[0]).layer(0), Calibration.load(trained)
    keys, query, at = shown.keys.float(), shown.query[:, :, -8:].float(), torch.arange(500)
    books = ProductBooks(made.layers[0], shown.scale, made.ropes[0])
    seen = torch.ones(8, 500, dtype=torch.bool)
    found = books.scores_of(DrawnQueries(query, keys, seen, torch.zeros(0), shown.scale, at))
    cache = filled(QueryPQ(4, artefact=str(trained)), Trace.open(traces[0]), 0, queries=False)
    for i in range(8):
        held = cache.selector.logits(query[None, :, :, i], torch.ones(1, 500, dtype=torch.bool))[0]
        off = found[:, :, i] - held
        off = (off - off.median(2, keepdim=True).values).abs()  # less what a query adds to all rows
        assert float((off < 0.01 * held.abs().max()).float().mean()) > 0.98  # rounded centroids name few keys otherwise


def test_the_command_writes_what_bench_uses_and_goes_on_where_it_was_stopped(
    traces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = tmp_path / "codes.safetensors", query_codes._layer
    line = ["train", *map(str, traces), "--method", "querypq", "--subspaces", "4", "--out", str(file), "--json"]

    def stopped(prompts: object, index: int, *rest: object) -> object:
        if index:
            raise KeyboardInterrupt
        return real(prompts, index, *rest)

    monkeypatch.setattr(query_codes, "_layer", stopped)
    assert CliRunner().invoke(app, line).exit_code != 0
    assert not file.exists()
    done: list[int] = []

    def counted(prompts: object, index: int, *rest: object) -> object:
        done.append(index)
        return real(prompts, index, *rest)

    monkeypatch.setattr(query_codes, "_layer", counted)
    ran = CliRunner().invoke(app, line)
    assert ran.exit_code == 0, ran.output
    assert done == [1]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    report = json.loads(ran.stdout)
    assert report["recipe"]["subspaces"] == 4
    assert all(0.3 < share < 1 for share in report["kept"].values())
    spec = f"querypq:artefact={file},subspaces=4"
    line = ["bench", str(traces[1]), "--selector", spec, "--budget", "64", "--json", "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, line)
    assert ran.exit_code == 0, ran.output
    assert any(json.loads(line)["label"] == str(make_selector(spec)) for line in ran.stdout.splitlines())
    found = evaluate(Trace.open(traces[1]), make_selector(spec), 64, last=4).mean("recovered")
    assert found > evaluate(Trace.open(traces[1]), "random", 64, last=4).mean("recovered") + 0.1
    shown = CliRunner().invoke(app, ["info", str(file)])
    assert "querypq" in shown.stdout


def test_what_does_not_fit_is_refused_in_a_sentence(traces: list[Path], trained: Path, tmp_path: Path) -> None:
    trace = Trace.open(traces[0])
    made = QueryPQ(4, artefact=str(trained))
    with pytest.raises(CalibrationError, match="holds layers 0, 1, layer 7 is asked for"):
        made.for_layer(7)
    with pytest.raises(CalibrationError, match="of toy is for 2 KV heads of size 16, layer 0 here has 2 of size 32"):
        made.for_layer(LayerContext(0, rope=trace.ropes[0])).check_shape(2, 2, 32)
    with pytest.raises(CalibrationError, match=r"was made with a RoPE of .* here applies no RoPE"):
        made.for_layer(0).check_shape(2, 2, SIZE)
    with pytest.raises(ValueError, match=r"into 2 subspaces of 16 centroids, and .* give it subspaces=4,bits=4, or"):
        QueryPQ(artefact=str(trained)).for_layer(LayerContext(0, rope=trace.ropes[0])).check_shape(2, 2, SIZE)
    with pytest.raises(ValueError, match="is a calibration for querypq, and loki needs one for loki"):
        make_selector(f"loki:artefact={trained}")
    with pytest.raises(
        ValueError, match=r"have mean=rope, got mean=plain: leave mean out, or train a file with --mean pl"
    ):
        QueryPQ(4, artefact=str(trained), mean="plain")
    with pytest.raises(ValueError, match=r"codes of .* need them: give it a file that is trained with --mean plain"):
        make_selector(f"twostage:second=[querypq:subspaces=4,artefact={trained}]")
    layers = Calibration.load(trained).layers
    with pytest.raises(CalibrationError, match=r"layer 1 has back, centre, centroids, turn, querypq has .*'root'"):
        Calibration("querypq", {0: layers[0], 1: {name: layers[1][name] for name in NAMES}})
    with pytest.raises(CalibrationError, match=r"centroids of layer 0 are of S \* d = 16 channels, got 4 of 2"):
        Calibration("querypq", {0: {**layers[0], "centroids": layers[0]["centroids"][..., :2].contiguous()}})
    for options, message in (
        (["--hidden", "3"], "--hidden needs --method saap or locret, got --method querypq"),
        (["--subspaces", "5"], "a divisor of the head size, here of 16, got 5"),
        (["--bits", "6"], "bits is one of 4, 8, got 6"),
        (["--mean", "own"], "mean is one of rope, plain, got 'own'"),
        (["--sample", "0"], "sample and queries are 1 or more, got 0"),
    ):
        line = ["train", *map(str, traces), "--method", "querypq", "--out", str(tmp_path / "x.safetensors"), *options]
        ran = CliRunner().invoke(app, line)
        assert ran.exit_code == 2, ran.output
        assert message in " ".join(ran.stderr.split())
    ran = CliRunner().invoke(app, ["train", *map(str, traces), "--bits", "8", "--out", str(tmp_path / "x.safetensors")])
    assert "--bits needs --method querypq or a2ats, got --method saap" in " ".join(ran.stderr.split())
    other = tmp_path / "y.safetensors.partial"
    other.mkdir()
    (other / "run.json").write_text('{"identity": "another"}')
    with pytest.raises(TrainingError, match="is a run of other traces, options or versions that is not done"):
        train_codes(traces, tmp_path / "y.safetensors")
