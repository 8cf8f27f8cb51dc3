"""Layers that stay dense: what compiled code answers of their decoding, and what it leaves to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("numba")

from sparseattn.cache.rows_in_place import RowsInPlace
from sparseattn.models import dense_decoding
from sparseattn.models.attention_routing import Call
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.dense_rows import DenseRows
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.models.transformers_classes import DynamicLayer, DynamicSlidingWindowLayer
from tests.models.tiny import SMALL, padded, prompt, small


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call that compiled code answered; calls of few rows are answered too."""
    rows: list[int] = []
    serve = RowsInPlace.attend

    def noted(self: RowsInPlace, query: Any, read: int, *options: Any) -> Any:
        out = serve(self, query, read, *options)
        rows.extend([] if out is None else [read])
        return out

    monkeypatch.setattr(dense_decoding, "PAYS", 1)
    monkeypatch.setattr(RowsInPlace, "attend", noted)
    return rows


def logits(model: Any, inputs: dict[str, torch.Tensor], tokens: int = 6, **settings: Any) -> torch.Tensor:
    """`[tokens,B,V]` float32 of the tokens decoded behind a prompt, one by one, with the first two layers dense."""
    mask, out = inputs.get("attention_mask"), []
    with SparseCache(model, "exact", None, **SMALL, **{"dense_layers": 2} | settings) as cache, torch.no_grad():
        model(**inputs, **cache_argument(cache))
        for t in range(tokens):
            ids = torch.full((len(inputs["input_ids"]), 1), 5 + t)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(ids)], 1)
            last = model(input_ids=ids, attention_mask=mask, **cache_argument(cache)).logits[:, -1]
            out.append(last.float())
        assert all(cache.stats().layers[i].dense_calls == tokens + 1 for i in cache.dense_layers)
    return torch.stack(out)


@pytest.mark.parametrize(("dtype", "batch"), [("bfloat16", 2), pytest.param("float16", 1, marks=pytest.mark.slow)])
def test_decoded_tokens_of_dense_layers_read_all_rows(
    answered: list[int], monkeypatch: pytest.MonkeyPatch, dtype: str, batch: int
) -> None:
    model, inputs = small("llama").to(getattr(torch, dtype)), {"input_ids": prompt(60, batch)}
    made = logits(model, inputs)
    assert answered == [rows for t in range(6) for rows in [61 + t] * 2]  # both dense layers of each token
    monkeypatch.setattr(dense_decoding, "PAYS", 1 << 40)
    expected = logits(model, inputs)
    assert len(answered) == 12
    wide = logits(small("llama"), inputs)
    # no farther from float32's than the model's own, but for rounding
    assert (made - wide).norm() < 1.2 * (expected - wide).norm() + 1e-3 * wide.norm()


@pytest.mark.parametrize("kind", ["padding", "float32", "impl", "no groups", "few rows"])
def test_other_calls_stay_the_models(answered: list[int], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The call's mask hides rows, torch is as fast, other code was asked for, or there is nothing to gain."""
    model = small("llama", **({"num_key_value_heads": 4} if kind == "no groups" else {}))
    inputs = padded((60, 41)) if kind == "padding" else {"input_ids": prompt()}
    if kind == "few rows":
        monkeypatch.setattr(dense_decoding, "PAYS", 1 << 20)
    model = model if kind == "float32" else model.to(torch.bfloat16)
    logits(model, inputs, **({"impl": "gather"} if kind == "impl" else {}))
    assert not answered


def test_what_softmax_alone_does_not_give_stays_the_models(answered: list[int]) -> None:
    query, module, stored = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16), torch.nn.Module(), DenseRows()
    module.layer_idx, layer = 0, DynamicLayer()
    layer.update(*torch.zeros(2, 1, 2, 59, 16, dtype=torch.bfloat16))
    with torch.no_grad():
        keys, values = stored.put(0, layer, *torch.zeros(2, 1, 2, 1, 16, dtype=torch.bfloat16)) or (None, None)

    def out(*, asked: Any = query, of: Any = keys, mask: Any = None, impl: str = "sdpa", **options: Any) -> Any:
        return dense_decoding.decode_densely(Call(module, asked, of, values, mask, options), impl, None, stored)

    assert out().shape == (1, 1, 4, 16)
    assert out(softcap=30.0) is out(dropout=0.1) is out(indices=torch.zeros(1)) is out(impl="flash_attention_2") is None
    assert out(asked=query.clone().requires_grad_()) is None
    assert out(of=keys.clone()) is None  # no rows that are stored in place
    seen = torch.ones(1, 1, 1, 60, dtype=torch.bool)
    assert out(mask=seen) is not None
    seen[..., 3] = False
    assert out(mask=seen.clone()) is None
    assert out(mask=torch.zeros(1, 1, 1, 60)) is not None  # what is added to logits
    assert answered == [60] * 3


def test_windows_are_read_in_place(answered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 0 and 2 see 16 rows, layer 1 is sparse."""
    model = small("gemma3").to(torch.bfloat16)
    made = logits(model, {"input_ids": prompt()[:, :12]}, 8, dense_layers=0)
    assert answered == [min(13 + t, 16) for t in range(8) for _ in range(2)]
    monkeypatch.setattr(dense_decoding, "PAYS", 1 << 40)
    expected = logits(model, {"input_ids": prompt()[:, :12]}, 8, dense_layers=0)
    assert len(answered) == 16
    assert (made - expected).norm() < 0.05 * expected.norm()


def test_windows_that_hide_rows_stay_the_models(answered: list[int]) -> None:
    """The second prompt has 20 columns of padding, which the sixth token's window leaves behind."""
    logits(small("gemma3").to(torch.bfloat16), padded((30, 10)), 8, dense_layers=0)
    assert answered == [16] * 6  # two layers of the last three tokens


def layers(kind: str) -> list[Any]:
    """Two of transformers' layers, of which one's rows are to be written in place."""
    made = [DynamicLayer() if kind == "all" else DynamicSlidingWindowLayer(8) for _ in range(2)]
    for layer in made if kind == "past" else ():
        layer.activate_past_recording()
    return made


@pytest.mark.parametrize("kind", ["all", "window", "past"])
def test_rows_written_in_place_are_what_transformers_keeps(kind: str) -> None:
    """Single tokens and several at once, tokens taken back, sequences that change places, storage that is full."""
    stored, (ours, theirs) = DenseRows(), layers(kind)
    draw, put = torch.Generator().manual_seed(0), 0
    for turn, count in enumerate([5, *[1] * 80, 3, *[1] * 20]):
        keys, values = torch.randn(2, 2, 1, count, 4, generator=draw)
        before = [] if turn < 2 else [ours.keys, ours.keys.clone(), ours.values, ours.values.clone()]
        with torch.no_grad():
            read = stored.put(0, ours, keys, values)
        expected = theirs.update(keys, values)
        put += read is not None
        for given, wanted in zip(ours.update(keys, values) if read is None else read, expected, strict=True):
            assert torch.equal(given, wanted)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert all(torch.equal(shown, held) for shown, held in zip(before[::2], before[1::2], strict=True))
        for layer in (ours, theirs):
            if turn % 9 == 8 and kind != "window":
                layer.crop(-2)
            if turn % 13 == 12:
                layer.batch_select_indices(torch.tensor([1, 0]))
    assert put == 100


def test_a_clone_goes_its_own_way() -> None:
    model, ids = small("gemma3"), prompt()
    with SparseCache(model, "exact", None, **SMALL) as cache, torch.no_grad():
        model(ids, **cache_argument(cache))
        model(ids[:, :1], **cache_argument(cache))
        twin, alone = cache.clone(), cache.clone()
        for t in range(1, 20):
            model(ids[:, t : t + 1], **cache_argument(cache))
            out = model(ids[:, 60 - t : 61 - t], **cache_argument(twin)).logits
        for t in range(1, 20):
            expected = model(ids[:, 60 - t : 61 - t], **cache_argument(alone)).logits
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["all", "window"])
@pytest.mark.parametrize("line", ["append", "newest"])
def test_a_pass_that_is_cut_short_leaves_the_layers_rows(monkeypatch: pytest.MonkeyPatch, kind: str, line: str) -> None:
    """Rows of the token are half stored, or stored and not yet the layer's."""
    stored, (ours, theirs) = DenseRows(), layers(kind)
    rows = torch.randn(16, 2, 1, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    for layer in (ours, theirs):
        layer.update(*torch.cat(tuple(rows[:9]), 3))
    with torch.no_grad():
        stored.put(0, ours, *rows[9])
    theirs.update(*rows[9])
    before = dict(vars(ours))

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(RowsInPlace, line, cut)
        with pytest.raises(KeyboardInterrupt):
            stored.put(0, ours, *rows[10])
    vars(ours).update(before)  # as the way back from such a pass does
    with torch.no_grad():
        read = stored.put(0, ours, *rows[11])
    assert read is not None
    for given, wanted in zip(read, theirs.update(*rows[11]), strict=True):
        assert torch.equal(given, wanted)


def test_gradients_leave_rows_to_transformers() -> None:
    stored, (layer, _) = DenseRows(), layers("all")
    layer.update(*torch.randn(2, 1, 2, 5, 4))
    assert stored.put(0, layer, *torch.randn(2, 1, 2, 1, 4)) is None
    with torch.no_grad():
        assert stored.put(0, layer, *torch.randn(2, 1, 2, 2, 4)) is None
        assert stored.put(0, layer, torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4).double()) is None
        assert stored.put(0, layer, *torch.randn(2, 1, 2, 1, 4)) is not None
