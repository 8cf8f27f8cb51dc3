"""`set_attn_implementation("sparseattn")`: a model's own choice is read alone, with transformers' own caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from sparseattn.models import native_attention
from sparseattn.models.errors import ModelError
from sparseattn.models.native_attention import register
from tests.models.tiny import generate, plain, same
from tests.models.tiny_native import FAMILIES, GLM5_NEXT, inputs, native

SLOW = pytest.mark.slow
QUICK = ("minimax_m3_vl", "qwen4_exp")  # of which the latter folds its choice into its mask, as GLM-5-Next does


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in QUICK else SLOW)
        for name in (*FAMILIES, GLM5_NEXT)
        if name != "hy_v4"  # which does more than softmax
    ],
)
def test_native_attention_by_itself(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = native(family, "sdpa", follow=False), inputs(2, 9)
    expected = generate(model, plain(model), given)
    model.set_attn_implementation(register())
    rows: list[int] = []

    def counted(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        rows.append(key.shape[2])
        return F.scaled_dot_product_attention(query, key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(native_attention, "scaled_dot_product_attention", counted)
        same(generate(model, plain(model), given), expected)
    assert len(rows) >= 23  # tokens that were decoded, each in a layer or more
    assert max(rows) <= 24 < 70


def test_native_attention_refuses_sinks() -> None:
    model = native("hy_v4", follow=False)
    model.set_attn_implementation(register())
    with pytest.raises(ModelError, match=r"learned sink .* use SparseCache\(native=True\), or eager"):
        model(inputs()["input_ids"])
