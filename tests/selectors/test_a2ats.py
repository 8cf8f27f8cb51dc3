"""A2ATS's choices beside its rule in loops and float64, what it learns, and its file."""

from __future__ import annotations

import cmath
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from sparseattn import A2ATS, KVCache, LayerContext
from sparseattn.cli.app import app
from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.channel_calibration import Calibration, CalibrationError
from sparseattn.selectors.parameters.window_codes import at_distance, before_rope, window_codes
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import TrainingError, WindowRecipe, train_window
from tests.cases import attention, heads

H, G, D, ROWS, LAST, BUDGET = 2, 3, 32, 150, 12, 20
DATA = {"random": heads, "structured": attention}
ROPE = Rope.of(D, 1000.0)


def turned(x: Tensor, by: float) -> Tensor:
    """Of `[D]` float64, RoPE by so many positions, pair by pair: i and i + D / 2."""
    half, out = D // 2, torch.empty(D, dtype=torch.float64)
    for i in range(half):
        pair = complex(float(x[i]), float(x[i + half])) * cmath.exp(1j * by * float(ROPE.inv_freq[i]))
        out[i], out[i + half] = pair.real, pair.imag
    return out


def file_of(codes: dict[str, Tensor], place: Path) -> str:
    Calibration("a2ats", {0: codes}, roped=False, ropes={0: ROPE}).save(place)
    return str(place)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("bits", "group"), [(9, "each"), (4, "softmax")])
def test_choices_are_those_of_the_authors_code(data: str, bits: int, group: str, tmp_path: Path) -> None:
    """junhuihe-hjh/A2ATS, vqkey/models/llama_masked.py: names by distance after the factor, queries at one position,
    products with centroids times the factor's inverse. The cache has every query at its last row."""
    queries, keys, values = DATA[data](1, H, G, ROWS, D)
    codes = {
        "factor": torch.randn(H, D, D, generator=torch.Generator().manual_seed(1)).tril() / 20 + torch.eye(D),
        "centroids": torch.randn(H, 1, 1 << bits, D, generator=torch.Generator().manual_seed(2)).bfloat16().float(),
    }
    selector = A2ATS(artefact=file_of(codes, tmp_path / "file.safetensors"), distance=300, group=group)
    selector.bind(LayerContext(layer=0, rope=ROPE))
    cache = KVCache(selector, sink=0, window=0, seal=1, check=True)
    cache.append(keys, values, queries)
    factors = codes["factor"].double()
    scores = torch.zeros(LAST, H, G, ROWS, dtype=torch.float64)
    for h in range(H):
        books = codes["centroids"][h, 0].double()
        bare = torch.stack([turned(keys[0, h, n].double(), -n) for n in range(ROWS)])
        names = torch.cdist(bare @ factors[h], books).argmin(1)
        centroids = (books @ torch.linalg.inv(factors[h]))[names]
        for t in range(LAST):
            for g in range(G):
                asked = queries[0, h, g, ROWS - LAST + t].double()
                scores[t, h, g] = centroids @ turned(asked, 300 - (ROWS - 1)) / D**0.5
    lists = scores if group == "each" else scores.softmax(-1).sum(2, keepdim=True)
    same = 0
    for t in range(LAST):
        found = cache.select(queries[:, :, :, ROWS - LAST + t], BUDGET).rows[0]
        for of_head, rank in zip(found, lists[t].flatten(0, 1), strict=True):  # rows of a name score alike
            best, least = rank[of_head].sort(descending=True).values, rank.topk(BUDGET).values
            same += int(len(set(of_head.tolist())) == BUDGET and torch.allclose(best, least, rtol=1e-4))
    assert same == lists[..., 0].numel()


def test_codes_err_least_in_the_logits_of_their_queries() -> None:
    """The same, vqkey/notebooks/construct_codebooks.py: the factor of the second moment, its numbers of root mean
    square 1; `|e L|^2` is the mean squared error of logits, up to that length."""
    keys, queries = torch.randn(H, 600, D), torch.randn(H, G, 400, D) * torch.linspace(0.1, 3, D)
    codes = window_codes(keys, queries, 4, 0)
    factor = codes["factor"].double()
    for h in range(H):
        flat = queries[h].double().flatten(0, 1)
        moment = flat.T @ flat
        length = moment.square().mean().sqrt()
        torch.testing.assert_close(factor[h] @ factor[h].T, moment / length, rtol=1e-4, atol=1e-4)
        books = codes["centroids"][h, 0].double()
        near = books[torch.cdist(keys[h].double() @ factor[h], books).argmin(1)]
        error = keys[h].double() - near @ torch.linalg.inv(factor[h])
        logits = (error @ flat.T).square().sum() / length
        torch.testing.assert_close((error @ factor[h]).square().sum(), logits, rtol=1e-4, atol=1e-4)
    plain = window_codes(keys, torch.eye(D).expand(H, 1, D, D), 4, 0)

    def off(codes: dict[str, Tensor]) -> float:
        turn = codes["factor"]
        near = torch.stack(
            [torch.cdist(k @ t, c[0]).argmin(1) for k, t, c in zip(keys, turn, codes["centroids"], strict=True)]
        )
        read = codes["centroids"][:, 0].gather(1, near[..., None].expand_as(keys)) @ torch.linalg.inv(turn)
        return float(((keys - read) @ queries.flatten(1, 2).mT).square().mean())

    assert off(codes) < 0.9 * off(plain)


def test_keys_and_queries_are_turned_where_scores_have_them() -> None:
    x, at = torch.randn(5, D), torch.tensor([0, 7, 40, 90, 3])
    rope = replace(ROPE, scaling=1.5)
    for n in range(5):
        bare = turned(x[n].double(), -int(at[n])).float()
        torch.testing.assert_close(before_rope(x, at, rope)[n], bare, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            at_distance(x, at, rope, 64)[n], turned(bare.double(), 64).float(), rtol=1e-4, atol=1e-4
        )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made = synthetic(400, layers=2, heads=H, group=G, size=D, gap=0.26)
    meta = {"model": "made", "model_layers": 2}
    place = tmp_path / "trace.safetensors"
    Trace.build([replace(made.layer(i), rope=ROPE) for i in range(2)], made.positions, meta).save(place)
    return place


def test_a_file_is_trained_and_used(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "codes.safetensors"
    line = ["train", str(trace), "--method", "a2ats", "--out", str(out), "--bits", "5", "--device", "cpu"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "mean squared error of codes" in done.output
    held = Calibration.load(out)
    layer = Trace.open(trace).layer(1)
    at = Trace.open(trace).positions
    queries = at_distance(layer.query.float(), at[-layer.query.shape[2] :], ROPE, 2048)
    expected = window_codes(before_rope(layer.keys.float(), at, ROPE), queries, 5, 0)
    torch.testing.assert_close(held.layers[1]["factor"], expected["factor"], rtol=1e-4, atol=1e-4)
    assert 0 < held.meta["error"]["1"] < 1
    assert str(A2ATS(artefact=str(out))).startswith("a2ats:artefact=")
    other = LayerContext(layer=1, rope=Rope.of(D, 500.0))
    with pytest.raises(CalibrationError, match="layer 1 here applies"):
        A2ATS(artefact=str(out)).for_layer(other).check_shape(H, G, D)


def test_keys_of_16_bits_whose_centroids_pass_their_range_are_found() -> None:
    """A power of two on the keys is one on every logit, so it changes no choice."""
    queries, keys, values = (part.half() for part in heads(2, H, G, 400, D))
    keys = keys.clamp(-3, 3)
    keys[1] /= 64  # of this sequence no centroid does
    chosen = []
    for times in (1, 2**14):
        selector = A2ATS(bits=5, group="sum").for_layer(LayerContext(rope=ROPE))
        cache = KVCache(selector, sink=4, window=8, seal=64, check=True)
        cache.append(keys * times, values, queries)
        chosen.append(cache.select(queries[:, :, :, -1], 16).rows.sort().values)
        assert bool(selector.centroids.data.isfinite().all())
        assert bool((selector.factor.data @ selector.back.data).allclose(torch.eye(D), atol=1e-3))
    assert bool((chosen[0] >= 0).all())
    assert torch.equal(*chosen)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fixed RoPE"):
        A2ATS().check_shape(H, G, D)
    with pytest.raises(ValueError, match="1 to 12, got 13"):
        A2ATS(13)
    with pytest.raises(TrainingError, match="1 to 12, got 0"):
        WindowRecipe(bits=0)
    bare = tmp_path / "bare.safetensors"
    synthetic(200, heads=H, group=G, size=D).save(bare)
    with pytest.raises(TrainingError, match="RoPE"):
        train_window([bare], tmp_path / "out.safetensors")
