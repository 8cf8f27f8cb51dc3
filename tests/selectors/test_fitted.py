"""Fitted estimates: a mass holds what it promises after, and did not before; the file, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from sparseattn import Exact, Fitted, KVCache, LowBit, Mass, Quest, Random, decode, evaluate, make_selector
from sparseattn.selectors.parameters.logit_fit import Estimates, EstimatesError
from sparseattn.traces.synthetic import synthetic
from sparseattn.training.fit_logits import fit

SETTINGS = {"sink": 2, "window": 16, "last": 12}


def trace(seed: int):
    return synthetic(700, heads=2, group=2, size=16, clusters=6, seed=seed)


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quest's estimates, fitted on a trace."""
    path = tmp_path_factory.mktemp("fitted") / "quest.safetensors"
    fit([trace(0)], Quest(8, "each"), **SETTINGS).save(path)
    return path


def test_a_fitted_bound_promises_what_it_holds(bounds: Path) -> None:
    raw, fitted = (
        evaluate(trace(0), one, Mass(0.7), **SETTINGS)
        for one in (Quest(8, "each"), Fitted(Quest(8, "each"), str(bounds)))
    )
    assert abs(fitted.mean("promised") - fitted.mean("mass")) < 0.5 * abs(raw.mean("promised") - raw.mean("mass"))
    free = [
        evaluate(trace(0), one, 64, **SETTINGS) for one in (Quest(8, "each"), Fitted(Quest(8, "each"), str(bounds)))
    ]
    assert free[0].mean("mass") == free[1].mean("mass"), "which rows are chosen stays as it is"


def test_the_index_is_the_inner_ones_wherever_the_file_lies(bounds: Path, tmp_path: Path) -> None:
    moved = shutil.copy(bounds, tmp_path / "moved.safetensors")
    one, other = (Fitted(Quest(8, "each"), str(file)) for file in (bounds, moved))
    assert one.index_arguments() == other.index_arguments()
    assert one.source() == other.source()


def test_true_estimates_stay_as_they_are_and_scaled_ones_are_scaled_back() -> None:
    found = fit([trace(1)], Exact(), **SETTINGS)
    for scale, offset in found.layers.values():
        torch.testing.assert_close(scale, torch.ones_like(scale), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(offset, torch.zeros_like(offset), rtol=1e-3, atol=1e-3)

    class Halved(Exact):
        def _scores(self, query, step):
            return super()._scores(query, step) / 2 + 1

    found = fit([trace(1), trace(2)], Halved(), layers=[0], **SETTINGS)
    scale, offset = found.of(0)
    torch.testing.assert_close(scale, torch.full_like(scale, 2.0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(offset, torch.full_like(offset, -2.0), rtol=1e-3, atol=1e-3)


def test_it_does_in_a_cache_what_its_inner_does_and_survives_copies(bounds: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 200, 16, generator=draw)
    query = torch.randn(1, 2, 2, 16, generator=draw)
    for selector in (Fitted(Quest(8, "each"), str(bounds)), Fitted(Quest(8, "each"), str(bounds)).for_layer(0)):
        cache = KVCache(selector, sink=2, window=4, check=True)
        cache.append(keys, values)
        twin = cache.clone()
        assert torch.equal(decode(query, cache, Mass(0.5)), decode(query, twin, Mass(0.5)))
        plain = KVCache(Quest(8, "each"), sink=2, window=4)
        plain.append(keys, values)
        assert torch.equal(decode(query, cache, 32), decode(query, plain, 32))
        assert not torch.equal(decode(query, cache, Mass(0.5)), decode(query, plain, Mass(0.5)))
        scale, offset = Estimates.load(bounds).of(0)
        raw = plain.selector.weigh(query, plain.search.step(), 192)
        mine = cache.selector.weigh(query, cache.search.step(), 192)
        size = raw.selection.length.float().log()
        expected = scale.flatten()[None, :, None] * (raw.weights - size) + offset.flatten()[None, :, None] + size
        torch.testing.assert_close(mine.weights, expected)


def test_what_does_not_fit_is_refused(bounds: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not estimate"):
        Fitted(Random(), str(bounds))
    with pytest.raises(EstimatesError, match="was fitted to quest"):
        Fitted(LowBit(), str(bounds))
    with pytest.raises(EstimatesError, match="is not there"):
        Fitted("quest", str(tmp_path / "none.safetensors"))
    selector = Fitted(Quest(8, "each"), str(bounds))
    with pytest.raises(EstimatesError, match="layer 7 is asked for"):
        selector.for_layer(7)
    with pytest.raises(EstimatesError, match="2 KV heads with 2 query heads"):
        selector.for_layer(0).check_shape(2, 3, 16)
    made = make_selector(f"sparseattn:Fitted:inner=[quest:page=8,group=each],artefact={bounds}")
    assert repr(made) == repr(selector)
    with pytest.raises(ValueError, match="does not estimate"):
        fit([trace(0)], "random")
    with pytest.raises(ValueError, match="one model"):
        fit([], "quest")
    whole = bounds.read_bytes()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EstimatesError):
        Estimates.load(broken)
    for scale in (0.0, float("nan")):
        with pytest.raises(EstimatesError, match="scale"):
            Estimates("quest", {0: (torch.full((1, 1), scale), torch.zeros(1, 1))})
    with pytest.raises(EstimatesError, match="at least one layer"):
        Estimates("quest", {})


def test_the_command_fits_what_the_selector_reads(tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from sparseattn.cli.app import app

    path, out = tmp_path / "trace.safetensors", tmp_path / "quest.safetensors"
    trace(3).save(path)
    words = ["calibrate", str(path), "--method", "mass", "--selector", "quest", "--layers", "0", "--last", "4"]
    done = runner.invoke(app, [*words, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert Estimates.load(out).selector == repr(Quest())
    assert "scale" in done.output
    folder = tmp_path / "one-head"
    folder.mkdir()
    synthetic(200, heads=1, group=1, size=16).save(folder / "trace.safetensors")
    done = runner.invoke(app, ["calibrate", str(folder), *words[2:], "--out", str(folder / "quest.safetensors")])
    assert done.exit_code == 0, done.output
    again = runner.invoke(app, [*words[:4], "--out", str(out)])
    assert again.exit_code != 0
    shown = json.loads(runner.invoke(app, ["info", str(out), "--json"]).output)
    (shown,) = shown if isinstance(shown, list) else [shown]
    assert (shown["kind"], shown["selector"], shown["layers"]) == ("fitted estimates", repr(Quest()), [0])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--method mas", "--method must be one of loki, doublesparsity, kascade, duo, mass, got 'mas'"),
        ("--method loki --selector quest", "--method mass needs --selector, and no other method takes it"),
        ("--method mass --selector quest --device cpu", "--method mass takes no --device"),
        ("--method mass --selector quest --before-rope", "--method mass takes no --before-rope"),
        ("--method loki --window 9", "only --method mass takes --sink, --window and --last"),
    ],
)
def test_options_of_another_method_are_refused(given: str, sentence: str, tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from sparseattn.cli.app import app

    done = runner.invoke(app, ["calibrate", "no-trace.safetensors", *given.split(), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
