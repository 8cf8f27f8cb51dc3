"""Traces of models with an index of their own hold what it chose, and a replay reads that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, Quest, evaluate
from sparseattn.evaluation.native_overlap import native_overlap
from sparseattn.models.capture import capture
from sparseattn.selectors.baselines.native import Native
from sparseattn.traces.trace import Trace, TraceError, TraceLayer
from tests.models.tiny_native import native

TOKENS, SLOW = 90, pytest.mark.slow


def chosen_by_hooks(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """What every indexer put out in one pass, as `[Hs,T,T]` bool: an own way to it."""
    out: dict[int, Tensor] = {}

    def note(module: Any, _: Any, result: Tensor) -> None:
        tokens = ids.shape[1]
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if result.shape[-1] == tokens and result.ndim == 4:  # a mask, in older releases to be added to logits
            out[module.layer_idx] = result[0] if result.dtype == torch.bool else result[0] == 0
        elif result.ndim == 3:
            out[module.layer_idx] = (
                torch.zeros(1, tokens, tokens, dtype=torch.bool).scatter(2, result.long(), True) & seen
            )
        else:
            blocks = torch.zeros(*result.shape[1:3], -(-tokens // module.block_size), dtype=torch.bool)
            for head, token in torch.cartesian_prod(*map(torch.arange, result.shape[1:3])).tolist():
                blocks[head, token, [block for block in result[0, head, token].tolist() if block >= 0]] = True
            out[module.layer_idx] = blocks.repeat_interleave(module.block_size, -1)[..., :tokens] & seen

    hooks = [m.register_forward_hook(note) for m in model.modules() if type(m).__name__.endswith("Indexer")]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return out


def rows_of(layer: TraceLayer) -> Tensor:
    """`[Hs,Q,T]` bool of what a layer's index chose."""
    assert layer.native is not None
    held = torch.zeros(*layer.native.shape[:2], TOKENS + 1, dtype=torch.bool)
    return held.scatter_(2, torch.where(layer.native < 0, TOKENS, layer.native).long(), True)[..., :TOKENS]


@pytest.mark.parametrize("family", ["minimax_m3_vl", "qwen4_exp", "glm_moe_dsa", pytest.param("axk2", marks=SLOW)])
def test_a_trace_holds_what_the_index_chose(family: str, tmp_path: Path) -> None:
    model, ids = (
        native(family, follow=False),
        torch.randint(3, 96, (1, TOKENS), generator=torch.Generator().manual_seed(0)),
    )
    expected = chosen_by_hooks(model, ids)
    if family == "glm_moe_dsa":
        expected[1] = expected[0]  # which has no index of its own
    # ReLU makes many scores of the families with latents equal, and which of them are best hangs on the shapes.
    chunk = 32 if family in ("minimax_m3_vl", "qwen4_exp") else TOKENS
    trace = capture(model, ids, tmp_path / "t.safetensors", chunk=chunk, queries=40)
    assert trace.meta["attention_differs"] == {}  # recomputed over the rows chosen
    assert {index for index in trace.layers if trace.shapes[index].native} == set(expected)
    for index, chosen in expected.items():
        layer = trace.layer(index)
        assert torch.equal(rows_of(layer), chosen[:, -40:])
        short = trace.first(TOKENS - 10).layer(index)
        assert layer.native is not None
        assert torch.equal(short.native, layer.native[:, :30])
        _replayed(trace, index, rows_of(layer))
    trace.verify()
    trace.save(tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()
    layers, overlap = native_overlap(trace)
    assert layers == sorted(expected)
    first, second = (expected[index][:, -40:] for index in layers[:2])
    torch.testing.assert_close(overlap.diagonal(), torch.ones(len(layers), dtype=torch.float64))
    torch.testing.assert_close(overlap[1, 0].float(), ((first & second).sum(-1) / second.sum(-1)).mean())
    with pytest.raises(ValueError, match="holds nothing of it for layers"):
        evaluate(Trace.build([_without(trace.layer(index))], trace.positions), Native(), 8, sink=0, window=1, last=4)


def _replayed(trace: Trace, index: int, chosen: Tensor) -> None:
    """A replay reads those rows and the newest, and its mass is theirs."""
    layer, last = trace.layer(index), 8
    found = evaluate(trace, Native(), None, sink=0, window=1, last=last, layers=[index], seal=1)
    heads, group = layer.query.shape[:2]
    logits = torch.einsum("hgtd,hnd->hgtn", layer.query[:, :, -last:].float(), layer.keys.float()) * layer.scale
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[-last:]
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    read = chosen[:, -last:] | torch.eye(TOKENS, dtype=torch.bool)[-last:]
    read = read.expand(heads, -1, -1)[:, None]
    mass = (weights * read).sum(-1).mean(-1).flatten()
    torch.testing.assert_close(found.heads["mass"][0].float(), mass, rtol=0, atol=1e-5)
    width = trace.meta["native_row_bytes"][str(index)]
    index_bytes = width / (heads * 2 * layer.keys.shape[2] * 4)  # of a row's key and value in one head
    share = found.heads["bytes_share"][0] - found.heads["attended_share"][0]
    torch.testing.assert_close(share, torch.full_like(share, index_bytes), rtol=0.02, atol=0)
    rows = read.sum(-1).double().mean(-1).expand(-1, group).flatten()
    torch.testing.assert_close(found.heads["attended"][0], rows)
    few = evaluate(trace, Native(), 4, sink=0, window=1, last=last, layers=[index], seal=1)
    assert (few.heads["attended"] <= 5).all()
    for other in (Exact(), Quest(4)):
        evaluate(trace, other, 4, sink=0, window=1, last=last, layers=[index])


def _without(layer: TraceLayer) -> TraceLayer:
    return TraceLayer(layer.index, layer.query, layer.keys, layer.values, layer.scale)


def test_a_choice_that_does_not_fit_its_layer() -> None:
    query, rows = torch.zeros(2, 2, 5, 8), torch.zeros(2, 5, 8)
    for chosen in (torch.zeros(2, 5, 3), torch.zeros(3, 5, 3, dtype=torch.int32)):
        with pytest.raises(TraceError, match=r"native is int32 \[Hs,Q,S\]"):
            TraceLayer(0, query, rows, rows, 1.0, native=chosen)
    with pytest.raises(TraceError, match="native"):
        TraceLayer(0, query, rows, rows, 1.0, native=torch.zeros(2, 4, 3, dtype=torch.int32))
