"""Layers that stay dense: what compiled code answers of their decoding, and what it leaves to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("numba")

from sparseattn.models import dense_decoding
from sparseattn.models.attention_routing import Call
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.sparse_cache import SparseCache
from tests.models.tiny import SMALL, padded, prompt, small


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call that compiled code answered; calls of few rows are answered too."""
    rows: list[int] = []
    serve = dense_decoding.attend_every

    def noted(query: Any, keys: Any, values: Any, **options: Any) -> Any:
        rows.append(keys.shape[2])
        return serve(query, keys, values, **options)

    monkeypatch.setattr(dense_decoding, "PAYS", 1)
    monkeypatch.setattr(dense_decoding, "attend_every", noted)
    return rows


def logits(model: Any, inputs: dict[str, torch.Tensor], tokens: int = 6, **settings: Any) -> torch.Tensor:
    """`[tokens,B,V]` float32 of the tokens decoded behind a prompt, one by one, with the first two layers dense."""
    mask, out = inputs.get("attention_mask"), []
    with SparseCache(model, "exact", None, **SMALL, dense_layers=2, **settings) as cache, torch.no_grad():
        model(**inputs, **cache_argument(cache))
        for t in range(tokens):
            ids = torch.full((len(inputs["input_ids"]), 1), 5 + t)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(ids)], 1)
            last = model(input_ids=ids, attention_mask=mask, **cache_argument(cache)).logits[:, -1]
            out.append(last.float())
        assert [cache.stats().layers[i].dense_calls for i in (0, 1)] == [tokens + 1] * 2
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
    query, keys = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 60, 16, dtype=torch.bfloat16)

    def out(*, asked: torch.Tensor = query, impl: str = "sdpa", **options: Any) -> Any:
        return dense_decoding.decode_densely(Call(torch.nn.Module(), asked, keys, keys, None, options), impl, None)

    assert out().shape == (1, 1, 4, 16)
    assert out(softcap=30.0) is out(dropout=0.1) is out(indices=torch.zeros(1)) is out(impl="flash_attention_2") is None
    assert out(asked=query.clone().requires_grad_()) is None
    learned = Call(torch.nn.Module(), query, keys, keys.clone().requires_grad_(), None, {})
    assert dense_decoding.decode_densely(learned, "sdpa", "numba") is None
    narrow = Call(torch.nn.Module(), query, keys, keys[..., :8], None, {})
    assert dense_decoding.decode_densely(narrow, "sdpa", None) is None
    assert answered == [60]


def test_windows_that_hide_rows_stay_the_models(answered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 0 sees 16 rows, layer 1 all; before a window is full there is nothing to hide."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = small("gemma3", layer_types=kinds).to(torch.bfloat16)
    made = logits(model, {"input_ids": prompt()[:, :12]}, 8)
    assert [rows for rows in answered if rows >= 16] == [16 + t for t in range(5)]  # of layer 1 alone, up to 20 rows
    monkeypatch.setattr(dense_decoding, "PAYS", 1 << 40)
    expected = logits(model, {"input_ids": prompt()[:, :12]}, 8)
    assert (made - expected).norm() < 0.05 * expected.norm()
