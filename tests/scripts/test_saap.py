"""The study of SAAP: its parts by hand computations, at small sizes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("faiss")

from scripts.saap import prompts, study
from scripts.saap.distribution import deviation, imbalance, inputs, largest_share, size_deviations
from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace, TraceLayer
from sparseattn.training import Filters, Recipe, TrainingError, train

H, G, D, T, C = 2, 2, 16, 600, 8


def trace(seed: int) -> Trace:
    made = synthetic(T, heads=H, group=G, size=D, clusters=8, rope=True, seed=seed)
    layer = made.layer(0)
    return Trace.build(
        [TraceLayer(1, layer.query, layer.keys, layer.values, layer.scale, layer.rope)],
        made.positions,
        made.meta,
        f"p{seed}",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts, an artefact of de-roped keys and one of roped ones."""
    place = tmp_path_factory.mktemp("study")
    for part, seeds in (("train", (0, 1)), ("held-out", (2,))):
        (place / part).mkdir()
        for seed in seeds:
            trace(seed).save(place / part / f"{seed}.safetensors")
    recipe = {"clusters": C, "hidden": 8, "steps": 3, "batch": 16, "queries": 64, "filters": Filters(63, 32)}
    for name, roped in (("plain", False), ("roped", True)):
        train(
            [place / "train"],
            place / f"{name}.safetensors",
            Recipe(roped=roped, **recipe),
            held_out=[place / "held-out"],
        )
    return place


def test_prompts_of_other_kinds_are_the_same_every_time_and_look_back() -> None:
    made = dict(prompts.others())
    assert made == dict(prompts.others())
    assert set(made) == set(prompts.OTHER)
    assert {len(text) for text in made.values()} == {prompts.TOKENS}
    lines = made["kv"].split(b"\n")[:-1]
    told = set(lines[: len(lines) * 7 // 10])
    assert len(told) == len(lines) * 7 // 10, "told once"
    assert all(line in told for line in lines[len(lines) * 4 // 5 :])
    rows = made["numbers"].split(b"\n")[:-1]
    assert 0.85 < len(set(rows)) / len(rows) < 0.95


def test_imbalance_and_deviation() -> None:
    even, uneven = torch.arange(8).repeat(3), torch.zeros(24, dtype=torch.int64)
    assert (imbalance(even, 8), deviation(even, 8)) == (1.0, 0.0)
    assert imbalance(uneven, 8) == pytest.approx(8.0)
    assert deviation(uneven, 8) == pytest.approx(math.sqrt(7.0)), "one bucket of 24, seven of 0, about 3"


def test_samplings_tell_a_partition_that_follows_positions(folder: Path) -> None:
    """Keys that only their position tells apart: roped, narrow positions crowd few buckets; de-roped, nothing does."""
    draw = torch.Generator().manual_seed(0)
    rope, tokens = Rope.of(D, 10.0), 3 * 4096
    same = torch.nn.functional.normalize(torch.randn(1, 1, D, generator=draw), dim=-1).expand(H, tokens, D)
    keys = rope.rotate(same + 0.01 * torch.randn(H, tokens, D, generator=draw), torch.arange(tokens) / 4096)
    made = Trace.build([TraceLayer(1, keys[:, None], keys, keys, 1.0, rope)], torch.arange(tokens))
    artefact = Artefact.load(folder / "roped.safetensors")
    spread = torch.nn.functional.normalize(keys[:, torch.linspace(0, tokens - 1, C).long()], dim=-1)
    artefact.layers[1].centroids.copy_(spread)
    found = size_deviations(artefact, 1, [made], [made])
    assert set(found) == {"training prompts", "held-out prompts", "one prompt", "narrow positions"}
    assert found["narrow positions"] > 1.5 * found["held-out prompts"]


def test_largest_share_is_of_queries(folder: Path) -> None:
    held = Trace.open(folder / "held-out" / "2.safetensors")
    artefact = Artefact.load(folder / "plain.safetensors")
    shares = largest_share(artefact, 1, [held, held])
    query = inputs(artefact, held, 1)[1]
    layer = held.layer(1)
    assert layer.rope is not None
    assert torch.equal(query, layer.rope.unrotate(layer.query.float(), held.positions))
    for h in range(H):
        nearest = (query[h].flatten(0, 1) @ artefact.layers[1].centroids[h].T).argmax(-1)
        assert shares["nearest"][h] == pytest.approx(float(torch.bincount(nearest).max()) / (G * T))
    assert all(1 / C <= share <= 1 for share in shares["classifier"])


def test_a_shift_of_all_positions_changes_attention_by_nothing(folder: Path) -> None:
    held = Trace.open(folder / "held-out" / "2.safetensors")
    moved = study.shifted(held, 5000)
    assert torch.equal(moved.positions, held.positions + 5000)
    before, after = held.layer(1), moved.layer(1)
    assert not torch.allclose(before.keys, after.keys, atol=0.1)
    torch.testing.assert_close(
        after.query[:, 0] @ after.keys.mT, before.query[:, 0] @ before.keys.mT, atol=2e-3, rtol=0
    )
    artefact = Artefact.load(folder / "plain.safetensors")
    torch.testing.assert_close(inputs(artefact, moved, 1)[0], inputs(artefact, held, 1)[0], atol=2e-3, rtol=0)


def test_records_are_kept_and_bars_read_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "LAYERS", (1,))
    monkeypatch.setattr(study, "FAR", 0.0)
    held = {"p2": Trace.open(folder / "held-out" / "2.safetensors")}
    paths = dict.fromkeys(study.ABLATIONS, folder / "roped.safetensors")
    methods = {name: spec.format(**paths) for name, spec in study.METHODS.items()}
    methods = {
        name: spec
        if "artefact" in spec or spec.split(":")[0] not in ("saap", "kmeans", "moments", "sparseattn")
        else f"{spec},artefact={folder / 'plain.safetensors'}"
        for name, spec in methods.items()
    }
    path = folder / "compare.jsonl"
    records = study.compare(held, methods, path, study.BUDGETS, 2)
    assert set(records) == {("p2", name, budget) for name in methods for budget in study.BUDGETS}
    before = path.stat().st_mtime_ns
    assert study.compare(held, methods, path, study.BUDGETS, 2) == records
    assert path.stat().st_mtime_ns == before, "nothing was measured again"
    rows = study.bars(records, ["p2"], G)
    assert [(row["layer"], row["head"]) for row in rows] == [(1, 0), (1, 1)]
    one = records["p2", "SAAP", 0.05]["heads"]["recovered"][0]
    assert rows[1]["SAAP"][1] == pytest.approx((one[2] + one[3]) / 2)
    assert study.table(records, "p2", list(methods)).row_count == len(methods)
    assert study.judgement(study.judged(rows, ["p2"])).row_count >= len(study.JUDGED)
    other = Trace.build([held["p2"].layer(1)], held["p2"].positions, {"text": {"name": "another"}}, "p2")
    study.compare({"p2": other}, {"random": "random"}, path, study.BUDGETS, 2)
    assert path.stat().st_mtime_ns > before, "another text by the same name is measured"
    study.figure(records, ["p2"], folder / "figure.png")
    assert (folder / "figure.png").stat().st_size > 5000


def test_bars_are_judged_by_what_they_say() -> None:
    def row(**other) -> dict:
        some = {name: [0.5, 0.8] for name in study.COMPARED} | {f"{name}: lookups": None for name in study.COMPARED}
        some |= {"exact, each query head": [0.7, 0.95], "k-means, roped": [0.3, 0.6], "k-means, no RoPE": [0.4, 0.7]}
        return {"trace": "recall", "layer": 1, "head": 0, "far mass": 0.9, **some, **other}

    def passes(one: dict, recurrences: tuple[str, ...] = ("recall",)) -> dict[str, bool]:
        return {two["bar"]: two["passes"] for two in study.judged([one], recurrences) if two["method"] == "SAAP"}

    order, exact, perfect = "no-rope k-means at 1 %, itself above roped", "Exact at 5 %", "a perfect classifier at 5%"
    assert passes(row()) == {order: True, exact: False}, "0.8 is less than 0.9 of 0.95"
    assert passes(row(SAAP=[0.5, 0.86]))[exact]
    assert not passes(row(**{"k-means, roped": [0.45, 0.6]}))[order], "roped is above no rope"
    assert not passes(row(SAAP=[0.4, 0.8]))[order]
    assert passes(row(), ()) == {"a perfect classifier at 1%": True, perfect: True}
    spread = row(**{"exact, each query head": [0.3, 0.89]}, SAAP=[0.5, 0.75])
    assert passes(spread) == {order: True, "a perfect classifier at 1%": True, perfect: False}
    assert passes(row(**{"SAAP: lookups": 0.95}))["lookups at 1 %"]
    assert not passes(row(**{"SAAP: lookups": 0.94}))["lookups at 1 %"]


def test_an_ablation_of_another_recipe_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ablations").mkdir()
    for name in study.ABLATIONS:
        (tmp_path / "ablations" / f"{name}.safetensors").write_bytes((folder / "roped.safetensors").read_bytes())
    with pytest.raises(TrainingError, match=r"roped.safetensors was trained with clusters 8 instead of 1024, .*delete"):
        study.ablations(tmp_path)


def test_every_method_of_the_study_is_one(folder: Path) -> None:
    paths = dict.fromkeys(study.ABLATIONS, folder / "plain.safetensors")
    made = {name: make_selector(spec.format(**paths)) for name, spec in study.METHODS.items()}
    assert len({repr(one) for one in made.values()}) >= len(made) - len(study.ABLATIONS), "they differ"
    assert set(study.SHIFTED) <= set(made)


def test_lookups_of_a_group_are_pooled() -> None:
    record = {
        "heads": {"lookup_hits": [[1.0, 0.5, None, None]], "lookups": [[1.0, 3.0, 0.0, 0.0]], "mass": [[0, 1, 2, 4]]}
    }
    pooled = np.array(study.per_kv(record, "lookup_hits", 2))
    assert pooled[0, 0] == pytest.approx(2.5 / 4)
    assert math.isnan(pooled[0, 1])
    assert study.per_kv(record, "mass", 2) == [[0.5, 3.0]]
