"""Synthetic traces: reproducible, causal, with sinks and concentration as asked for, and hard for an index of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import TraceLayer


def weights(layer: TraceLayer) -> torch.Tensor:
    """`[H,G,Q,T]` causal softmax attention."""
    logits = layer.query.float() @ layer.keys.float()[:, None].mT * layer.scale
    q, t = logits.shape[-2:]
    mask = torch.arange(t) <= torch.arange(t - q, t)[:, None]
    return logits.masked_fill(~mask, -torch.inf).softmax(-1)


@pytest.mark.parametrize("rope", [False, True, 500000.0])
def test_shapes_and_seeds(rope: bool | float) -> None:
    trace = synthetic(403, 3, 2, 32, layers=2, rope=rope, dtype=torch.bfloat16)
    layer = trace.layer(1)
    assert (trace.tokens, trace.layers) == (403, (0, 1))
    assert list(layer.query.shape) == [3, 2, 403, 32]
    assert list(layer.keys.shape) == list(layer.values.shape) == [3, 403, 32]
    assert (layer.keys.dtype, layer.scale) == (torch.bfloat16, 32**-0.5)
    assert (layer.rope is None) == (rope is False)
    again = synthetic(403, 3, 2, 32, layers=2, rope=rope, dtype=torch.bfloat16).layer(1)
    other = synthetic(403, 3, 2, 32, layers=2, rope=rope, dtype=torch.bfloat16, seed=1).layer(1)
    for name in ("query", "keys", "values"):
        assert torch.equal(getattr(layer, name), getattr(again, name))
        assert not torch.equal(getattr(layer, name), getattr(other, name))
    assert not torch.equal(layer.keys[0], layer.keys[1])
    assert not torch.equal(layer.query[0, 0], layer.query[0, 1])


@pytest.mark.parametrize("rope", [False, True])
def test_a_longer_trace_of_more_heads_begins_with_the_shorter(rope: bool) -> None:
    short = synthetic(301, 1, size=16, rope=rope).layer(0)
    long = synthetic(700, 2, 2, size=16, layers=2, rope=rope).layer(0)
    torch.testing.assert_close(long.keys[0, :301], short.keys[0])
    assert torch.equal(long.values[0, :301], short.values[0])
    a, b = long.query[0, 0, 4:301, :-2], short.query[0, 0, 4:, :-2]
    torch.testing.assert_close(a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("sinks", [1, 4])
def test_sinks_draw_their_share_of_every_query(rope: bool, sinks: int) -> None:
    layer = synthetic(600, 2, 2, 32, sinks=sinks, sink_share=0.4, rope=rope).layer(0)
    mass = weights(layer)[..., :sinks].sum(-1)
    torch.testing.assert_close(mass[..., sinks:], torch.full_like(mass[..., sinks:], 0.4), rtol=1e-3, atol=0)
    assert layer.values[:, :sinks].abs().max() < 0.1
    if layer.rope is not None:
        assert layer.rope.rotated == 30


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("concentration", [0.8, 0.95])
def test_concentration_of_the_best_rows(sinks: int, concentration: float) -> None:
    layer = synthetic(4000, size=32, sinks=sinks, concentration=concentration, queries=64, clusters=64).layer(0)
    mass = weights(layer)[0, 0, :, sinks:]
    best = mass.topk(40, -1).values.sum(-1) / mass.sum(-1)
    assert best.mean().item() == pytest.approx(concentration, abs=0.01)


def test_queries_of_the_last_tokens() -> None:
    every, last = (synthetic(500, size=16, queries=n).layer(0) for n in (None, 70))
    assert torch.equal(every.keys, last.keys)
    torch.testing.assert_close(every.query[:, :, -70:], last.query)


def test_one_token_or_none_beyond_the_sinks() -> None:
    assert weights(synthetic(1, size=8, sinks=0).layer(0)).item() == 1
    assert synthetic(2, size=8, sinks=1).layer(0).query.isfinite().all()
    assert weights(synthetic(5, size=8).layer(0)).isfinite().all()


def scanned(query: torch.Tensor, keys: torch.Tensor, lists: int, recall: float) -> float:
    """Share of the keys that an inverted file of k-means lists scans for `recall` of each query's 50 best keys."""
    unit = keys / keys.norm(dim=-1, keepdim=True)
    centers = unit[torch.randperm(len(keys), generator=torch.Generator().manual_seed(0))[:lists]]
    for _ in range(8):
        nearest = (unit @ centers.T).argmax(-1)
        centers = torch.zeros_like(centers).index_add_(0, nearest, unit)
        centers /= centers.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    nearest = (keys @ centers.T).argmax(-1)
    sizes = torch.bincount(nearest, minlength=lists)
    order = (query @ centers.T).argsort(-1, descending=True)
    rank = order.argsort(-1).gather(-1, nearest[(query @ keys.T).topk(50, -1).indices])  # [Q,50]
    probes = rank.flatten().sort().values[int(recall * rank.numel()) - 1] + 1
    return (sizes[order].cumsum(-1)[:, probes - 1].float().mean() / len(keys)).item()


def test_queries_lie_off_the_keys_and_more_so_with_gap() -> None:
    shares = []
    for gap in (-0.5, 0.0, 0.26):
        layer = synthetic(16384, sinks=0, gap=gap, clusters=128, queries=256).layer(0)
        shares.append(scanned(layer.query[0, 0], layer.keys[0], 128, 0.95))
    like_keys, whitened, off = shares
    assert like_keys < 0.15
    assert off > 2 * like_keys
    assert off > whitened


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens is at least 1, got 0"),
        ({"heads": 0}, "heads is at least 1, got 0"),
        ({"size": 9}, "size is even and at least 8, got 9"),
        ({"sinks": 64}, r"sinks is between 0 and tokens - 1 \(63\), got 64"),
        ({"queries": 65}, r"queries is between 1 and tokens \(64\), got 65"),
        ({"spread": 1.5}, "spread is a share of variance, 0 to 1, got 1.5"),
        ({"group": 0}, "group is at least 1, got 0"),
        ({"layers": 0}, "layers is at least 1, got 0"),
        ({"size": 0}, "size is even and at least 8, got 0"),
        ({"spread": float("nan")}, "spread is a share of variance, 0 to 1, got nan"),
        ({"gap": float("inf")}, "gap is a finite number, got inf"),
        ({"gap": float("nan")}, "gap is a finite number, got nan"),
        ({"rope": 0}, "rope is True, False or a positive finite theta, got 0"),
        ({"rope": -1.0}, "positive finite theta, got -1.0"),
        ({"rope": float("inf")}, "positive finite theta, got inf"),
        ({"sink_share": 1.0}, "sink_share lies between 0 and 1, got 1.0"),
        ({"concentration": 0.0}, "concentration lies between 0 and 1, got 0.0"),
        ({"dtype": torch.int8}, "dtype is float32, float16 or bfloat16, got torch.int8"),
    ],
)
def test_errors_are_sentences(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthetic(**{"tokens": 64, **arguments})
