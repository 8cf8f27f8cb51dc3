"""What a method may ask for beside rows: what they weighed, and rows of its own that are attended to with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, KVCache, Selection, Selector, SparQ, Tail, TwoStage, attend, decode, evaluate
from sparseattn.core.context import StepContext
from sparseattn.evaluation.recall_sweep import curve
from sparseattn.evaluation.step_measures import compare
from sparseattn.selectors.abilities import HasTail, Observes
from sparseattn.serving.vllm.settings import Settings
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from tests.cases import Estimate, Same, attention, heads

B, H, G, D = 2, 2, 3, 32


class Watch(Observes, Exact):
    """Keeps what it was told, for a test to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = (Selection.none(1, 1), torch.zeros(0))

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        self.seen = selection, weights


class Thief(HasTail, Watch):
    """Its tail, a row with a zero key and a value of 1, takes half of the softmax, or nothing."""

    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail | None:
        batch, heads, group, size = query.shape
        logits = (query @ self.stored_keys().mT / size**0.5).flatten(1, 2).gather(2, selection.rows)
        total = logits.logsumexp(-1, keepdim=True)  # of the rows chosen, all that is attended where nothing is recent
        ids = torch.tensor([[0], [-1]])[:, None].expand(-1, heads * group, -1)  # sequence 1 has none
        ones = torch.ones(batch, heads, 1, size)
        return Tail(0 * ones, ones, Selection.tokens(ids, bias=total))


def filled(selector: Selector, apart: str | None, sink: int = 4, window: int = 8) -> tuple[KVCache, Tensor]:
    queries, keys, values = attention(B, H, G, 100, D)
    cache = KVCache(selector, sink=sink, window=window, seal=selector.unit, sealed_device=apart)
    cache.append(keys, values)
    return cache, queries[:, :, :, 99]


APART = pytest.mark.parametrize("apart", [None, "cpu"])


@APART
def test_a_step_tells_what_each_row_got_of_everything_attended(apart: str | None) -> None:
    cache, query = filled(watch := Watch(), apart)
    decode(query, cache, 16)
    selection, weights = watch.seen
    assert selection is cache.search.latest
    plain, _ = filled(Watch(), None)
    named = plain.select(query, 16)
    expected = attend(query, plain.keys, plain.values, named, plain.bounds, impl="reference", weights=True)[2]
    torch.testing.assert_close(weights, expected)
    assert bool((weights.sum((2, 3)) < 1).all()), "sink and window have a share"
    watch.seen = (Selection.none(1, 1), torch.zeros(0))
    cache.select(query, 16)
    assert not len(watch.seen[1]), "what is not attended to is not told"


@APART
def test_a_tail_is_attended_to_and_in_the_denominator(apart: str | None) -> None:
    cache, query = filled(thief := Thief(), apart, 0, 0)
    out = decode(query, cache, 16)
    weights = thief.seen[1].sum((2, 3))  # [B,Hq]
    torch.testing.assert_close(weights, torch.tensor([0.5, 1.0])[:, None].expand(-1, H * G))
    cache, _ = filled(Exact(), apart, 0, 0)
    plain = decode(query, cache, 16)
    torch.testing.assert_close(out[0], plain[0] / 2 + 0.5)
    torch.testing.assert_close(out[1], plain[1])


def test_a_comparison_observes_and_counts_the_tail() -> None:
    """On one sequence: the measures are of what `decode` gives, and a row of a tail and biases are read."""
    queries, keys, values = attention(1, H, G, 100, D)
    cache, other = (KVCache(Estimate(), sink=4, window=8, seal=1) for _ in range(2))
    for one in (cache, other):
        one.append(keys, values)
    query = queries[:, :, :, 99]
    measured = compare(query, cache, cache.select(query, 16), D**-0.5)
    out = decode(query, other, 16)
    full = (query @ keys.mT * D**-0.5).softmax(-1) @ values
    error = (out - full).norm(dim=-1) / full.norm(dim=-1)
    torch.testing.assert_close(measured["relative_error"], error.double().flatten(), rtol=1e-4, atol=1e-6)
    assert measured["attended"].tolist() == measured["distinct_rows"].tolist() == [16 + 12 + 1] * (H * G)
    row, scanned = 2 * D * 4, (100 - 12) * D * 4
    share = (29 * row + (16 + 1) * 4 + scanned) / (100 * row)
    torch.testing.assert_close(measured["bytes_share"], torch.full((H * G,), share, dtype=torch.float64))
    for one in (cache, other):
        assert float(one.selector.got.data.sum()) > 0
    torch.testing.assert_close(cache.selector.got.data, other.selector.got.data)


def test_parts_ask_through_the_whole() -> None:
    for whole in (Same(Estimate()), TwoStage(Estimate(False), 2, rows=16)):
        assert whole.find(Observes)
        assert whole.find(HasTail)
        cache, query = filled(whole, None)
        decode(query, cache, 32)
        (part,) = (part for _, part in whole.parts() if isinstance(part, Estimate))
        assert float(part.got.data.sum()) > 0
        assert cache.search.latest_tail is not None


class Mute(Observes, Exact):
    """Asks for what it does not take."""


class Tailless(HasTail, Exact):
    """The same of a tail."""


def test_who_asks_must_take_it() -> None:
    for method, lacking in ((Mute, "observe"), (Tailless, "tail")):
        with pytest.raises(TypeError, match=f"abstract.*{lacking}"):
            method()


def test_who_learns_from_attention_is_refused_where_there_is_none() -> None:
    layer = synthetic(96, heads=H, group=G, size=8, layers=1).layer(0)
    with pytest.raises(ValueError, match=r"tests.cases:Estimate learns from what its selections got, and a sweep"):
        curve(Estimate(), layer.keys, layer.query[:, :, -4:], k=16)


def test_a_server_refuses_what_its_steps_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseattn import Quest

    monkeypatch.setattr(Quest, "find", lambda self, ability: [self] if ability is Observes else [])
    with pytest.raises(ValueError, match="'quest' cannot be served: in vLLM a method neither learns"):
        Settings("quest", 64).make()


def test_a_tail_by_logits_of_another_scale_is_refused_and_right_once_told() -> None:
    """With all channels SparQ's mean value weighs exactly what the rows not read would, at the layer's scale too."""
    queries, keys, values = heads(1, 2, 1, 300, 32)
    query, scale = queries[:, :, :, -1], 0.5
    for told in (None, scale):
        selector = TwoStage(SparQ(32), 4, rows=16) if told is None else SparQ(32)
        selector.bind(replace(selector.layer_context, scale=told))
        cache = KVCache(selector, sink=0, window=0, seal=16)
        cache.append(keys[:, :, :288], values[:, :, :288])
        if told is None:
            with pytest.raises(ValueError, match=r"by logits of scale 0\.17\d+, and this step has 0\.5"):
                decode(query, cache, 20, scale=scale)
            continue
        got = decode(query, cache, 20, scale=scale)[:, :, 0]
        assert cache.search.latest is not None
        read = cache.search.latest.mask(288)
        weights = (query[:, :, 0, None].double() @ keys[:, :, :288].mT.double() * scale).softmax(-1)[:, :, 0]
        left = weights.masked_fill(read, 0.0).sum(-1, keepdim=True)
        expected = ((weights * read)[..., None] * values[:, :, :288]).sum(2) + left * values[:, :, :288].double().mean(
            2
        )
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
        assert float(left.min()) > 1e-4


def test_a_replay_tells_a_layers_scale(tmp_path: Path) -> None:
    plain = synthetic(300, heads=2, group=1, size=32, clusters=8)
    path = tmp_path / "t.safetensors"
    Trace.build([replace(plain.layer(0), scale=0.5)], plain.positions).save(path)
    found = evaluate(Trace.open(path), TwoStage(SparQ(32), 4, rows=16), 32, last=4)  # else its tail would be refused
    assert 0 < found.mean("relative_error") < 1


@pytest.mark.parametrize(("method", "words"), [("snapkv", "drops rows for good"), ("infinigen", "capture --ahead")])
def test_what_a_sweep_cannot_ask_is_refused(method: str, words: str) -> None:
    layer = synthetic(200, heads=2, group=2, size=16).layer(0)
    with pytest.raises(ValueError, match=words):
        curve(method, layer.keys, layer.query[:, :, -4:], k=16)
