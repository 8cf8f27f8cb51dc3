"""Locret's rows beside its rule in float64, and the training of its heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from sparseattn import KVCache, LayerContext, Locret
from sparseattn.cli.app import app
from sparseattn.core.rope import Rope
from sparseattn.roles.roles import Roles
from sparseattn.selectors.parameters.channel_calibration import Calibration, CalibrationError
from sparseattn.selectors.parameters.retaining_heads import random_heads
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import RetainingRecipe, TrainingError, train_retaining
from tests.cases import attention, heads
from tests.selectors.test_eviction_methods import BUDGET, PROMPT, STEPS, D, G, H, steps

DATA = {"random": heads, "structured": attention}
ROPE = Rope.of(D, 1000.0)


def of_file(weights: dict[str, Tensor], place: Path) -> Locret:
    Calibration("locret", {0: weights}, roped=False, ropes={0: ROPE}).save(place)
    selector = Locret(str(place))
    selector.bind(LayerContext(rope=ROPE))
    return selector


def test_a_trained_file_is_known_by_its_content(tmp_path: Path) -> None:
    weights = (random_heads(H, G, D, 4, seed, 0) for seed in (1, 1, 2))
    one, moved, other = (of_file(part, tmp_path / str(n)).index_arguments() for n, part in enumerate(weights))
    assert one == moved
    assert one != other


@pytest.mark.parametrize("data", DATA)
def test_the_rows_of_the_largest_scores_are_held_and_the_answers_first(data: str, tmp_path: Path) -> None:
    """huangyuxiang03/Locret, locret/models/llama/modeling_llama.py:573-581 (one network of queries, keys and values
    before RoPE, all heads behind each other), locret/inference/infer.py:33 (the best of each KV head)."""
    queries, keys, values = DATA[data](1, H, G, PROMPT + STEPS, D)
    weights = random_heads(H, G, D, 40, 1, 0)
    first = torch.cat([weights[name].flatten(0, -2) for name in ("queries", "keys", "values")]).double()  # [in,W]
    tokens = torch.arange(PROMPT)
    bare = [ROPE.unrotate(x[0].double(), torch.arange(PROMPT + STEPS)) for x in (queries, keys)]
    score = torch.empty(H, PROMPT, dtype=torch.float64)
    for n in tokens.tolist():
        token = torch.cat([bare[0][:, :, n].flatten(), bare[1][:, n].flatten(), values[0, :, n].double().flatten()])
        hidden = token @ first
        score[:, n] = weights["out"].double() @ (hidden * hidden.sigmoid())
    cache = KVCache(of_file(weights, tmp_path / "heads.safetensors"), sink=0, window=1, seal=1, check=True)
    same = 0
    for t, rows, _ in steps(cache, queries, keys, values):
        newer = list(range(PROMPT, t))[-BUDGET:]
        for h in range(H):
            mine = [*score[h].topk(BUDGET - len(newer)).indices.tolist(), *newer, t]
            same += int(rows[h].nonzero()[:, 0].tolist() == sorted(mine))
    assert same == STEPS * H


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace whose odd tokens are attended to, and say so by their values."""
    made = synthetic(600, layers=1, heads=H, group=G, size=D, gap=0.26)
    layer, odd = made.layer(0), (torch.arange(600) % 2)[:, None]
    keys = torch.zeros_like(layer.keys)
    keys[..., 0] = 4 * odd[:, 0]
    query = torch.zeros_like(layer.query)
    query[..., 0] = 3
    still = Rope(torch.zeros(D // 2))  # so that every position is alike
    layer = replace(layer, keys=keys, query=query, values=layer.values + 2 * odd, rope=still)
    place = tmp_path / "trace.safetensors"
    Trace.build([layer], made.positions, {"model": "made", "model_layers": 1}).save(place)
    return place


def test_heads_are_trained_to_foresee_the_answers_logits(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads.safetensors"
    line = ["train", str(trace), "--method", "locret", "--out", str(out), "--hidden", "32", "--answer", "100"]
    done = CliRunner().invoke(app, [*line, "--steps", "60", "--rate", "0.02", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "mean loss of the last tenth" in done.output
    opened = Trace.open(trace)
    layer = opened.layer(0)
    shares = []
    for selector in (Locret(str(out)), Locret(hidden=32)):
        cache = KVCache(selector.for_layer(LayerContext(layer=0, rope=layer.rope)), sink=0, window=0, seal=600)
        cache.append(layer.keys[None], layer.values[None], layer.query[None])
        rows = cache.select(layer.query[None, :, :, -1], 100).rows[0]
        shares.append(float((rows % 2).double().mean()))
    assert shares[0] > 0.95
    assert shares[1] < 0.95
    with pytest.raises(CalibrationError, match="is for 3 query heads of a KV head, here are 2"):
        Locret(str(out)).for_layer(LayerContext(layer=0, rope=layer.rope)).check_shape(H, 2, D)


def test_what_is_refused(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fixed RoPE"):
        Locret().check_shape(H, G, D)
    with pytest.raises(TrainingError, match="fewer than 2 of them lie before an answer of 599"):
        train_retaining([trace], tmp_path / "out.safetensors", RetainingRecipe(answer=599))
    with pytest.raises(TrainingError, match="1 or more, got 0"):
        RetainingRecipe(hidden=0)
    from sparseattn import evaluate

    roles = Roles([[*["window"] * (H - 1), "locret"]])
    with pytest.raises(ValueError, match=f"reads all {H} KV heads of a layer, and is given 1"):
        evaluate(Trace.open(trace), roles, 16, last=2)
