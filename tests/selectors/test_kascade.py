"""Kascade: which layers are anchors, which head reads which, and that a layer reads its anchor's choice of the step."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparseattn import Exact, Kascade, KVCache, Quest, Selection, Selector, decode, evaluate, make_selector
from sparseattn.cli.app import app
from sparseattn.core.context import LayerContext
from sparseattn.core.layer_choices import Board
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.selectors.parameters.layer_similarity import Similarity, SimilarityError
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import TrainingError
from sparseattn.training.similarity import similarity
from tests.cases import Buckets, Heaviest, heads

H, G, TOKENS = 3, 2, 700


def turned(by: int) -> list[int]:
    return [(head + by) % H for head in range(H)]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Layers 1, 4 and 6 are alike but for the order of their heads, and layer 5 is another."""
    made = synthetic(TOKENS, layers=2, heads=H, group=G, size=32, gap=0.26)
    first, other = made.layer(0), made.layer(1)

    def at(index: int, by: int):
        rows = {name: getattr(first, name)[turned(by)] for name in ("query", "keys", "values")}
        return replace(first, index=index, **rows)

    layers = [at(1, 0), at(4, 1), replace(other, index=5), at(6, 2)]
    return Trace.build(layers, made.positions, {"model": "made", "model_layers": 8})


@pytest.fixture(scope="module")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("similarity")
    trace.save(folder / "trace.safetensors")
    similarity([folder / "trace.safetensors"], folder / "similarity.safetensors", queries=16)
    return folder / "similarity.safetensors"


# -- the calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighed", [False, True])
def test_anchors_are_those_that_serve_all_layers_best(weighed: bool) -> None:
    """Against every set of layers that holds the first one."""
    draw = torch.Generator().manual_seed(0)
    number = 7
    shares = torch.rand(number, number, 2, 2, generator=draw) * torch.ones(number, number).triu()[..., None, None]
    layers = [0, 2, 3, 5, 8, 9, 11]
    made = Similarity(layers, shares)
    importance = torch.rand(number, generator=draw).tolist() if weighed else None
    between = shares.double().amax(-1).mean(-1)

    def served(anchors: tuple[int, ...]) -> float:
        each = [float(between[max(a for a in anchors if a <= b), b]) for b in range(number)]
        return sum(one * weight for one, weight in zip(each, importance or [1.0] * number, strict=True))

    for count in range(1, number + 1):
        sets = [(0, *rest) for rest in itertools.combinations(range(1, number), count - 1)]
        best = max(sets, key=served)
        assert made.anchors(count, importance) == [layers[at] for at in best]
        if not weighed:
            assert made.score(made.anchors(count)) == pytest.approx(served(best) / number)
    assert made.map(2, 5) == shares[1, 3].argmax(-1).tolist()


def test_layers_that_are_alike_are_found_with_their_heads(file: Path) -> None:
    made = Similarity.load(file)
    assert made.layers == (1, 4, 5, 6)
    torch.testing.assert_close(made.between.diagonal(), torch.ones(4, dtype=torch.float64))
    assert made.map(1, 4) == turned(1)
    assert made.map(4, 6) == turned(1)
    assert made.map(1, 6) == turned(2)
    assert made.between[0, 1] == made.between[0, 3] == made.between[1, 3] == 1
    assert made.between[0, 2] < 0.5
    assert made.anchors(3) == [1, 5, 6], "a layer reads the nearest anchor before it"
    assert [made.read_by([1, 5, 6], layer) for layer in made.layers] == [1, 1, 5, 6]
    assert made.meta["queries"] == [16]


def test_the_command_writes_the_file_and_says_the_anchors(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.safetensors"
    line = ["calibrate", str(file.with_name("trace.safetensors")), "--method", "kascade", "--out", str(out)]
    done = CliRunner().invoke(app, [*line, "--queries", "16", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["anchors"]["3"]["layers"] == [1, 5, 6]
    assert torch.equal(Similarity.load(out).heads, Similarity.load(file).heads)
    assert "3: 1, 5, 6 (1.00)" in CliRunner().invoke(app, [*line, "--queries", "16"]).output
    shown = json.loads(CliRunner().invoke(app, ["info", str(out), "--json"]).output)
    assert (shown["kind"], shown["layers"], shown["anchors"]["3"]) == ("similarity of layers", [1, 4, 5, 6], [1, 5, 6])
    for wrong, sentence in (
        (["--before-rope"], "kascade takes keys and queries after RoPE"),
        (["--queries", "0"], "queries are 1 or more"),
        (["--method", "loki", "--queries", "3"], "only --method kascade and duo take --queries"),
        (["--layers", "2"], "holds layers 1, 4, 5, 6, not"),
    ):
        refused = CliRunner().invoke(app, [*line, *wrong])
        assert refused.exit_code != 0
        assert sentence in " ".join(refused.output.split())


def test_a_similarity_is_known_by_its_content(file: Path, tmp_path: Path) -> None:
    moved = shutil.copy(file, tmp_path / "moved.safetensors")
    assert Kascade(str(moved)).index_arguments() == Kascade(str(file)).index_arguments()
    assert Kascade(str(moved)).index_arguments() != Kascade(anchors=5).index_arguments()


def test_a_similarity_that_is_none_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SimilarityError, match="no similarity file"):
        Kascade(str(tmp_path / "none"))
    damaged = tmp_path / "damaged.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(SimilarityError, match="damaged"):
        Similarity.load(damaged)
    with pytest.raises(SimilarityError, match=r"\[L,L,H,H\] = \[2, 2, H, H\]"):
        Similarity([0, 1], torch.ones(2, 3, 1, 1))
    with pytest.raises(SimilarityError, match="rising number, got"):
        Similarity([1, 0], torch.ones(2, 2, 1, 1))
    with pytest.raises(SimilarityError, match="of 4 layers 1 to 4 are anchors, got 5"):
        Similarity.load(file).anchors(5)
    short = synthetic(200, heads=1, group=1, size=16)
    short.save(tmp_path / "short.safetensors")
    with pytest.raises(TrainingError, match="wants queries behind row"):
        similarity([tmp_path / "short.safetensors"], tmp_path / "out.safetensors")


# -- in comparisons ----------------------------------------------------------------------------------------------------


def test_a_layer_reads_what_its_anchor_chose_by_the_map(trace: Trace, file: Path) -> None:
    exact, mapped, plain = (
        evaluate_budgets(trace, one, [32, "10%"], Replay(last=6))
        for one in (Exact("softmax"), Kascade(str(file), 3), Kascade(anchors=[1, 5, 6]))
    )
    for found, own, numbered in zip(mapped, exact, plain, strict=True):
        torch.testing.assert_close(found.heads["recovered"], own.heads["recovered"])
        assert bool((numbered.heads["recovered"][1] < own.heads["recovered"][1]).all()), "other heads choose otherwise"
        for one in (found, numbered):
            scanned = one.heads["scanned"]
            assert scanned[1].tolist() == [0] * (H * G)
            assert torch.equal(scanned[[0, 2, 3]], own.heads["scanned"][[0, 2, 3]])
            assert torch.equal(one.heads["attended"], own.heads["attended"])
    assert evaluate(trace, Kascade(str(file), 1), 32, last=2).heads["recovered"][2].mean() < 0.5


def test_choices_of_query_heads_and_biases_are_read_too(trace: Trace, file: Path) -> None:
    found, own = (
        evaluate(trace, one, 32, last=4, layers=[1, 4, 6]) for one in (Kascade(str(file), [1], "exact"), Exact())
    )
    torch.testing.assert_close(found.heads["recovered"], own.heads["recovered"])
    pages = evaluate(trace, Kascade(str(file), [1], Quest(8, "each")), 32, last=4, layers=[1, 4])
    torch.testing.assert_close(pages.heads["recovered"][0].view(H, G)[turned(1)].flatten(), pages.heads["recovered"][1])


def test_choices_kept_over_steps_and_over_layers(trace: Trace, file: Path) -> None:
    both = evaluate(trace, f"kascade:artefact={file},anchors=[1],inner=[freekv:tau=-1]", 32, last=4, steps=("scanned",))
    scanned = both.steps["scanned"]
    assert scanned.gt(0).tolist() == [[[layer == 0 and t == 0 for t in range(4)]] * (H * G) for layer in range(4)]


def test_one_list_for_all_heads_of_a_layer(trace: Trace) -> None:
    """OmniKV's: the rows with the largest probability that any query head gives."""
    queries, keys, values = heads(2, 2, 3, 100, 16)
    at = torch.arange(100).repeat(2, 1)
    at[1, 60:] = -1
    cache = KVCache(Exact("layer"), sink=0, window=0, seal=1, check=True)
    cache.append(keys, values, positions=at)
    query = queries[:, :, :, 0]
    chosen = cache.select(query, 9).rows
    for b, real in enumerate((100, 60)):
        weights = torch.softmax(query[b].double() @ keys[b, :, :real].double().mT / 4, -1)
        expected = set(weights.amax((0, 1)).topk(9).indices.tolist())
        assert [set(one.tolist()) for one in chosen[b]] == [expected] * 2
    for inner in ("exact:group=layer", "lessismore", "delta:page=8,recent=1"):
        found = evaluate(trace, f"kascade:inner=[{inner}],anchors=[1]", 32, last=2)
        assert found.heads["scanned"][1].tolist() == [0] * (H * G)
        torch.testing.assert_close(found.heads["recovered"][0].sort().values, found.heads["recovered"][1].sort().values)


def test_roles_may_follow_by_head(trace: Trace, file: Path) -> None:
    method = f"kascade:artefact={file},anchors=[1]"
    roles = Roles({1: method, 4: ["dense", method, "window"], 5: "dense", 6: Role(method, 48)})
    with pytest.raises(
        ValueError, match=r"budget of 48 rows, layer 1, whose choice it reads, .* and 32: give all layers"
    ):
        evaluate(trace, roles, 32, last=2)
    roles = Roles({1: method, 4: ["dense", method, "window"], 5: "dense", 6: method})
    found, own = (evaluate(trace, one, 32, last=2).heads["recovered"] for one in (roles, Exact("softmax")))
    torch.testing.assert_close(found[1].view(H, G)[1], own[1].view(H, G)[1])
    with pytest.raises(ValueError, match="for all of its KV heads, and is given 2 of 3"):
        evaluate(trace, Roles({1: [method, method, "dense"], 4: "dense", 5: "dense", 6: "dense"}), 32, last=2)


def test_what_it_refuses(trace: Trace, file: Path) -> None:
    for wrong in (0, [], [2, 1], [1, 1], [-1], True):
        with pytest.raises(ValueError, match="anchors are how many layers choose"):
            Kascade(anchors=wrong)
    with pytest.raises(ValueError, match=r"Heaviest.* drops rows in each layer apart"):
        Kascade(anchors=[0], inner=Heaviest())
    with pytest.raises(ValueError, match="`sparseattn train TRACES --method kascade"):
        evaluate(trace, "kascade", 32, last=2)
    for layers in ([4], [4, 1]):
        with pytest.raises(ValueError, match="reads in layer 4 what layer 1 chose, so that layer is measured too"):
            evaluate(trace, Kascade(anchors=[1]), 32, last=2, layers=layers)
    with pytest.raises(SimilarityError, match="is of layers 1, 4, 5, 6, layer 7 is asked for"):
        Kascade(str(file), [1]).for_layer(7).check_shape(H, G, 32)
    with pytest.raises(ValueError, match="is of layers of 3 KV heads, layer 4 here has 2"):
        Kascade(str(file), [1]).for_layer(4).check_shape(2, G, 32)
    queries, keys, values = heads(1, 2, 2, 100, 16)
    alone = KVCache(Kascade(anchors=[1]).for_layer(4), sink=0, window=4)
    alone.append(keys, values)
    with pytest.raises(ValueError, match="a KVCache by itself knows no other layer"):
        alone.seal()
    ordering = KVCache(Kascade(anchors=[0], inner=Buckets()), sink=0, window=4)
    ordering.append(keys, values, queries)
    with pytest.raises(ValueError, match="stores rows in an order of its own"):
        ordering.seal()
    label = make_selector("kascade:anchors=[0,2],inner=[quest:page=8]").label()
    assert label == "kascade:anchors=[0,2],inner=[quest:page=8]"


def test_layers_that_seal_otherwise_are_refused() -> None:
    _, keys, values = heads(1, 2, 2, 100, 16)
    board = Board()
    layers = [LayerContext(at, board=board) for at in range(2)]
    caches = [
        KVCache(Kascade(anchors=[0]).for_layer(layer), sink=0, window=window)
        for layer, window in zip(layers, (4, 9), strict=True)
    ]
    for cache in caches:
        cache.append(keys, values)
    query = torch.randn(1, 2, 2, 16)
    with pytest.raises(ValueError, match="layer 0 chose, and that layer chose nothing at this step"):
        decode(query, caches[1], 8)
    decode(query, caches[0], 8)
    with pytest.raises(ValueError, match=r"layer 1 has 91 sealed rows and a budget of 8 rows, layer 0, .* 96 and 8"):
        decode(query, caches[1], 8)


# -- in a model --------------------------------------------------------------------------------------------------------


class Place(Selector):
    """Reads one row, that which the token's position says."""

    def __init__(self) -> None:
        self.rows = 0

    def reset(self) -> None:
        super().reset()
        self.rows = 0

    def append(self, rows):
        self.rows += rows.keys.shape[2]

    def select(self, query, step, budget):
        return Selection.tokens((step.positions % 7)[:, None, None].expand(-1, query.shape[1], 1))


class Watched(Kascade):
    """Sees to it that every layer reads the choice of its own step."""

    seen = 0

    def select(self, query, step, budget):
        chosen = super().select(query, step, budget)
        if self.shown and self.follows is not None:
            Watched.seen += 1
            assert torch.equal(chosen.start, (step.positions % 7)[:, None, None].expand_as(chosen.start))
        return chosen


def test_layers_of_a_model_read_the_choice_of_their_step() -> None:
    pytest.importorskip("transformers")
    from sparseattn.models.sparse_cache import SparseCache
    from tests.models.tiny import MODES, SMALL, generate, padded, plain, prompt, same, small

    model = small("llama")
    modes = {name: ({"input_ids": prompt()}, MODES[name]) for name in ("greedy", "beams", "lookup")}
    modes["padded"] = padded((60, 41)), {}
    dense = {name: generate(model, plain(model), *given[:1], **given[1]) for name, given in modes.items()}
    for name, (inputs, options) in modes.items():
        with SparseCache(model, selector=Kascade(anchors=[0]), budget=None, **SMALL, check=True) as cache:
            same(generate(model, cache, inputs, **options), dense[name])
            twin = cache.clone()
            assert twin.board is not cache.board
            assert all(
                part.rows.selector.layer_context.board is twin.board
                for x in twin.sparse_layers.values()
                for part in x.parts
            )
        before = Watched.seen
        with SparseCache(model, selector=Watched(anchors=[0], inner=Place()), budget=4, **SMALL, check=True) as cache:
            generate(model, cache, inputs, **options)
        assert Watched.seen > before
    with pytest.raises(ValueError, match=r"layer 1: .* layer 0 chose, and that layer chose nothing at this step"):
        SparseCache(model, selector=Kascade(anchors=[0]), dense_layers=1)
