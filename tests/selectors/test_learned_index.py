"""Hata, HashAttention, Indexer, Seer: codes are what files say, learning finds more than chance, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparseattn import HashAttention, Hata, Indexer, KVCache, Seer, evaluate
from sparseattn.cli.app import app
from sparseattn.core.context import LayerContext
from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.learned_index import (
    level_tables,
    nibbles_of_levels,
    nibbles_of_signs,
    sign_tables,
)
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import CodesRecipe, IndexRecipe, TrainingError, index_run, train_codes, train_index
from sparseattn.training.learned_index import HashByLabels, PromptLayer, draw, fit
from sparseattn.utils.hashing import stream

SIZE = 16


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three prompts of one "model" of two layers, whose keys are of the same clusters."""
    folder, files = tmp_path_factory.mktemp("traces"), []
    made = synthetic(1500, 2, 2, SIZE, layers=2, clusters=24, seed=3)
    for number in range(3):
        part = slice(500 * number, 500 * (number + 1))
        known = {"model": "toy", "config_hash": "c0", "tokens_sha256": f"prompt {number}"}
        layers = [made.layer(i) for i in made.layers]
        cut = [
            type(layer)(layer.index, layer.query[:, :, part], layer.keys[:, part], layer.values[:, part], layer.scale)
            for layer in layers
        ]
        files.append(folder / f"{number}.safetensors")
        Trace.build(cut, torch.arange(500), known, f"p{number}").save(files[-1])
    return files


def test_a_hash_code_is_the_signs_of_products_and_the_distance_is_hamming() -> None:
    """By bits one by one."""
    draws = torch.Generator().manual_seed(0)
    keys, query = torch.randn(1, 2, 50, SIZE, generator=draws), torch.randn(1, 2, 3, SIZE, generator=draws)
    selector = Hata(bits=24, seed=5)
    cache = KVCache(selector, sink=0, window=0)
    cache.append(keys, keys)
    cache.seal()
    directions = selector.directions.data[0]
    near = torch.zeros(2, 50)
    for h in range(2):
        bits = keys[0, h] @ directions[h] > 0
        for g in range(3):
            asked = query[0, h, g] @ directions[h] > 0
            near[h] -= (bits != asked).sum(1)
    found = selector.logits(query, torch.ones(1, 50, dtype=torch.bool)).sum(2)[0]
    torch.testing.assert_close(found - found[:, :1], near - near[:, :1], rtol=0.0, atol=1e-4)
    chosen = cache.select(query, 10)
    for h in range(2):
        best = near[h].topk(10).values
        assert near[h][chosen.start[0, h].long()].sort().values.tolist() == best.sort().values.tolist()
    assert chosen.scan_bytes.tolist() == [[50 * 3 + 4 * SIZE * 24] * 2]


def test_levels_and_signs_by_tables_are_products_with_what_codes_stand_for() -> None:
    draws = torch.Generator().manual_seed(0)
    x, query = torch.randn(1, 2, 30, 8, generator=draws), torch.randn(1, 2, 3, 8, generator=draws)
    low, step = torch.full((1, 2, 8), -2.5), torch.full((1, 2, 8), 5 / 15)
    codes = nibbles_of_levels(x, low[:, :, None], step[:, :, None])
    read = low[:, :, None] + step[:, :, None] * codes
    assert float((read - x.clamp(-2.5, 2.5)).abs().max()) <= 0.5 * 5 / 15 + 1e-6
    tables = level_tables(query, low, step)  # [B,H,G,r,16]
    by_code = tables.gather(4, codes.long().mT[:, :, None].expand(-1, -1, 3, -1, -1)).sum(3)
    torch.testing.assert_close(by_code, query @ read.mT)
    signs = nibbles_of_signs(x)
    by_code = sign_tables(query).gather(4, signs.long().mT[:, :, None].expand(-1, -1, 3, -1, -1)).sum(3)
    torch.testing.assert_close(by_code, query @ torch.where(x > 0, 1.0, -1.0).mT)


@pytest.mark.parametrize(("method", "width"), [("hata", 16), ("hashattention", 16), ("indexer", 4)])
def test_what_was_learned_on_other_prompts_finds_more_than_chance(
    traces: list[Path], tmp_path: Path, method: str, width: int
) -> None:
    file = tmp_path / "index.safetensors"
    found = train_index(traces[:2], file, IndexRecipe(method, width, steps=50, rate=0.03))
    assert [list(part) for part in found.layers.values()] == [list(found.layers[0])] * 2
    assert sorted(found.meta["loss"]) == ["0", "1"]
    maker = {
        "hata": lambda **more: Hata(bits=width, **more),
        "hashattention": lambda **more: HashAttention(bits=width, **more),
        "indexer": lambda **more: Indexer(dimensions=width, **more),
    }
    trace, settings = Trace.open(traces[2]), {"last": 16, "window": 64, "seal": 1}
    learned, random = (
        evaluate(trace, maker[method](**more), 32, **settings).mean("recovered")
        for more in ({"artefact": str(file)}, {})
    )
    assert learned > random + 0.02


def test_what_all_keys_have_in_common_does_not_change_what_an_indexer_learns(
    traces: list[Path], tmp_path: Path
) -> None:
    """It adds the same to each logit. Keys of Gemma have most of their length in common."""
    trace = Trace.open(traces[0])
    moved = [trace.layer(index) for index in trace.layers]
    moved = [
        type(layer)(index, layer.query, layer.keys * 4 + 100, layer.values, layer.scale / 4)
        for index, layer in enumerate(moved)
    ]
    files = traces[0], tmp_path / "moved.safetensors"
    Trace.build(moved, trace.positions, dict(trace.meta), "moved").save(files[1])
    recipe = IndexRecipe("indexer", 4, steps=60)
    first, second = (train_index([file], tmp_path / f"index-{at}.safetensors", recipe) for at, file in enumerate(files))
    for index in first.layers:
        assert second.meta["loss"][str(index)] == pytest.approx(first.meta["loss"][str(index)], rel=0.02)
    shares = [
        evaluate(Trace.open(file), f"indexer:artefact={tmp_path / f'index-{at}.safetensors'}", 32, last=16, seal=1)
        for at, file in enumerate(files)
    ]
    assert shares[1].mean("recovered") == pytest.approx(shares[0].mean("recovered"), abs=0.03)


def test_a_killed_run_goes_on_from_the_layers_that_are_done(
    traces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, whole = IndexRecipe("indexer", 4, steps=10), tmp_path / "whole.safetensors"
    train_index(traces[:2], whole, recipe)
    layer, calls = index_run._layer, []

    def dies(prompts, index, *more):
        calls.append(index)
        if calls == [0, 1]:
            raise KeyboardInterrupt
        return layer(prompts, index, *more)

    monkeypatch.setattr(index_run, "_layer", dies)
    file = tmp_path / "killed.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train_index(traces[:2], file, recipe)
    train_index(traces[:2], file, recipe)
    assert calls == [0, 1, 1]
    found, wanted = Calibration.load(file), Calibration.load(whole)
    assert found.meta["loss"] == wanted.meta["loss"]
    for index, maps in wanted.layers.items():
        assert all(torch.equal(part, found.layers[index][name]) for name, part in maps.items())


def test_labels_of_the_papers_loss_fall_from_20_to_1_over_the_best_tenth() -> None:
    draws = torch.Generator().manual_seed(0)
    prompt = PromptLayer(
        torch.randn(2, 2, 400, SIZE, generator=draws), torch.randn(2, 400, SIZE, generator=draws), 0.25
    )
    index = HashByLabels(2, SIZE, 8, draws)
    drawn = draw(prompt, stream("labels"))
    labels = index.labels(drawn)
    for i in range(0, labels.shape[2], 7):
        best = max(int(drawn.seen[i].sum()), 10) // 10
        order = drawn.attention[0, 0, i].argsort(descending=True)
        wanted = torch.full((400,), -1.0)
        wanted[order[:best]] = torch.linspace(20, 1, best) if best > 1 else torch.tensor([20.0])
        torch.testing.assert_close(labels[0, 0, i], wanted)
    before = float(index.loss(drawn).detach())
    fit(index, [prompt], 60, 0.1, ("labels",))
    assert float(index.loss(drawn).detach()) < before


@pytest.mark.parametrize("method", ["hata", "hashattention", "indexer"])
def test_what_is_fitted_is_what_is_read(traces: list[Path], tmp_path: Path, method: str) -> None:
    """Scores in training are those of the file's selector, up to what is the same for all rows, and the factor
    of hash codes."""
    file, recipe = tmp_path / "index.safetensors", IndexRecipe(method, 8, steps=20)
    train_index(traces[:1], file, recipe)
    shown = Trace.open(traces[0]).layer(1)
    layer = PromptLayer(shown.query.float(), shown.keys.float(), shown.scale)
    index = recipe.index(layer, 1)
    fit(index, [layer], 20, recipe.highest, (0, "steps", 1))
    made = {"hata": Hata, "hashattention": HashAttention, "indexer": Indexer}[method]
    selector = made(str(file)).for_layer(LayerContext(1, scale=shown.scale))
    cache = KVCache(selector, sink=0, window=0)
    cache.append(shown.keys[None].float(), shown.values[None].float())
    cache.seal()
    query = shown.query[:, :, -1:].float()
    found = selector.logits(query[None, :, :, 0], torch.ones(1, 500, dtype=torch.bool))[0]
    with torch.no_grad():
        wanted = index.scores(query, layer.keys)[:, :, 0]
        if method != "indexer":
            wanted = wanted / (2 * index.parameters["factor"].exp()[:, None, None])
    torch.testing.assert_close(found - found[..., :1], wanted - wanted[..., :1], rtol=1e-3, atol=1e-3)


def test_the_papers_loss_learns_and_prompts_that_teach_nothing_are_refused(traces: list[Path], tmp_path: Path) -> None:
    found = train_index(traces[:1], tmp_path / "labels.safetensors", IndexRecipe("hata", 8, "hata", 10))
    assert all(bool(part["directions"].isfinite().all()) for part in found.layers.values())
    short, file = tmp_path / "short.safetensors", tmp_path / "none.safetensors"
    Trace.open(traces[0]).first(60).save(short)
    with pytest.raises(TrainingError, match="has 60 tokens, and prompts to learn from have 256 or more"):
        train_index([short], file, IndexRecipe("hata", 8))
    with pytest.raises(TrainingError, match="the loss is not finite after 20 steps at the rate 1e"):
        train_index(traces[:1], file, IndexRecipe("indexer", 4, steps=20, rate=1e30))
    with pytest.raises(TrainingError, match="a rate is above 0 and finite, got nan"):
        IndexRecipe("hata", rate=float("nan"))


def test_a_code_of_hashattention_is_the_signs_of_two_networks() -> None:
    """By one key and one query at a time, through three layers written out."""
    draws = torch.Generator().manual_seed(0)
    keys, query = torch.randn(1, 2, 20, SIZE, generator=draws), torch.randn(1, 2, 3, SIZE, generator=draws)
    selector = HashAttention(bits=16, seed=5)
    cache = KVCache(selector, sink=0, window=0)
    cache.append(keys, keys)
    cache.seal()

    def bits(x: torch.Tensor, side: str, place: tuple[int, ...]) -> torch.Tensor:
        for number in (1, 2, 3):
            matrix, bias = (getattr(selector, f"{side}{number}{end}").data[place] for end in ("", "_bias"))
            x = x @ matrix + bias
            x = x / (1 + (-x).exp()) if number < 3 else x
        return x > 0

    found = selector.logits(query, torch.ones(1, 20, dtype=torch.bool))[0]
    for h in range(2):
        near = torch.tensor(
            [
                [-float((bits(q, "queries", (0, h, 0)) != bits(k, "keys", (0, h))).sum()) for k in keys[0, h]]
                for q in query[0, h]
            ]
        )
        torch.testing.assert_close(found[h] - found[h][:, :1], near - near[:, :1], rtol=0.0, atol=1e-4)


@pytest.fixture(scope="module")
def roped(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two prompts of one "model" of one layer with RoPE, whose keys are of the same clusters."""
    folder, files = tmp_path_factory.mktemp("roped"), []
    layer = synthetic(2000, 2, 2, SIZE, clusters=12, spread=0.1, rope=True, sinks=0, seed=3).layer(0)
    for number in range(2):
        part, known = slice(1000 * number, 1000 * (number + 1)), {"model": "toy", "config_hash": "c0"}
        cut = type(layer)(
            0, layer.query[:, :, part], layer.keys[:, part], layer.values[:, part], layer.scale, layer.rope
        )
        files.append(folder / f"{number}.safetensors")
        known["tokens_sha256"] = f"prompt {number}"
        Trace.build([cut], torch.arange(1000 * number, 1000 * (number + 1)), known, f"p{number}").save(files[-1])
    return files


def test_a_gate_key_is_of_a_blocks_keys_before_rope_and_lies_at_its_first_row(roped: list[Path]) -> None:
    """The gate without a file, block by block."""
    layer = Trace.open(roped[0]).layer(0)
    rope, keys, query = layer.rope, layer.keys[:, :256].float(), layer.query[:, :, 300].float()
    assert rope is not None
    selector = Seer(page=16).for_layer(LayerContext(0, scale=layer.scale, rope=rope))
    cache = KVCache(selector, sink=0, window=0)
    cache.append(keys[None], keys[None])
    cache.seal()
    asked = rope.rotate(rope.unrotate(query, torch.tensor([255])).mean(1), torch.tensor([255]))
    chosen = cache.select(query[None], 48)
    for h in range(2):
        scores = []
        for start in range(0, 256, 16):
            mean = rope.unrotate(keys[h, start : start + 16], torch.arange(start, start + 16)).mean(0, keepdim=True)
            scores.append(float(rope.rotate(mean, torch.tensor([start]))[0] @ asked[h]))
        best = sorted(torch.tensor(scores).topk(3).indices.tolist())
        assert sorted(chosen.start[0, h].tolist()) == [16 * block for block in best]
    assert chosen.scan_bytes.tolist() == [[16 * 2 * SIZE + 4 * 2 * SIZE * SIZE] * 2]


def test_a_gate_learns_from_one_prompt_what_finds_more_in_another(roped: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "gate.safetensors"
    found = train_index(roped[:1], file, IndexRecipe("seer", 16, steps=120, rate=0.01))
    assert not found.roped
    assert found.layers[0]["keys"].shape == (2, SIZE, 3, SIZE)
    trace, settings = Trace.open(roped[1]), {"last": 32, "window": 64, "seal": 16}
    learned, means = (
        evaluate(trace, Seer(**more, page=16), 128, **settings).mean("recovered")
        for more in ({"artefact": str(file)}, {})
    )
    assert learned > means + 0.02
    with pytest.raises(ValueError, match="is of 16 rows a block, and page here is 32: give it a file of as many"):
        evaluate(trace, Seer(str(file), page=32), 128, last=2)
    with pytest.raises(ValueError, match="a prompt of 1000 tokens has no block of 4096 before its last"):
        train_index(roped[:1], tmp_path / "none.safetensors", IndexRecipe("seer", 4096))


def test_hata_says_nothing_of_masses() -> None:
    with pytest.raises(ValueError, match="mass"):
        evaluate(synthetic(300), Hata(bits=8), "mass:0.9", last=2)


def test_distilled_codes_agree_more_with_the_attention(traces: list[Path], tmp_path: Path) -> None:
    shares = []
    for steps in (0, 60):
        file = tmp_path / f"{steps}.safetensors"
        train_codes(traces[:2], file, CodesRecipe(2, distil=steps))
        spec = f"querypq:subspaces=2,artefact={file}"
        shares.append(evaluate(Trace.open(traces[2]), spec, 32, last=16, window=64, seal=1).mean("recovered"))
    assert shares[1] > shares[0]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "saap"}, "an index of hata, hashattention, indexer, seer is learned so, got 'saap'"),
        ({"method": "indexer", "objective": "hata"}, "for the method hata also hata, got 'hata' for indexer"),
        ({"method": "hata", "width": 12}, "bits is a multiple of 8, or 0, got 12"),
        ({"method": "hata", "steps": 0}, "steps are 2 or more"),
    ],
)
def test_recipes_that_cannot_be_are_refused(given: dict, sentence: str) -> None:
    with pytest.raises(TrainingError, match=sentence):
        IndexRecipe(**given)


def test_files_of_another_width_or_group_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "index.safetensors"
    maps = {"keys": torch.ones(2, SIZE, 4), "queries": torch.ones(2, 3, SIZE, 4), "low": -torch.ones(2, 4)}
    Calibration("indexer", {0: {**maps, "step": torch.ones(2, 4)}}).save(file)
    for dimensions, group, sentence in (
        (8, 3, "of 4 dimensions, and dimensions here is 8"),
        (4, 2, "of 3 query heads a KV head"),
    ):
        selector = Indexer(str(file), dimensions).for_layer(LayerContext(0))
        with pytest.raises(ValueError, match=sentence):
            selector.check_shape(2, group, SIZE)


def test_the_command_trains_and_says_what_it_made(traces: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "hata.safetensors"
    given = ["train", *map(str, traces[:2]), "--method", "hata", "--width", "16", "--steps", "5", "--out", str(file)]
    said = CliRunner().invoke(app, [*given, "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["recipe"]["width"] == 16
    said = CliRunner().invoke(app, ["train", str(traces[0]), "--method", "saap", "--width", "8", "--out", str(file)])
    assert said.exit_code == 2
    assert "--width needs --method hata or hashattention or indexer or seer, got --method saap" in " ".join(
        said.output.split()
    )
