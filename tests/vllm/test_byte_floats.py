"""A cache of 8-bit floats (FP8) is read as vLLM reads it, and the index is made of what is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import LENGTHS, SPARSE, TOKENS, Answer, ask, check_counts, engine, layers, llama, prompts, switched

from sparseattn.serving.vllm import adapters
from sparseattn.serving.vllm.block_packing import packing_of, read_as

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM keeps caches of 8 bits on processors with AVX-512"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def exact(model: Path) -> Answer:
    """What stock vLLM answers with a cache of 32 bits."""
    with engine(model, None) as llm:
        return ask(llm, prompts(*LENGTHS), TOKENS)


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_full_budget_is_stock_with_a_cache_of_8_bits(model: Path, exact: Answer, kind: str) -> None:
    """Pages, and then single rows. Stock says other tokens with a cache of 32 bits."""
    asked = prompts(*LENGTHS)
    with engine(model, None, kv_cache_dtype=kind) as llm:
        expected = ask(llm, asked, TOKENS)
    assert exact.tokens != expected.tokens
    with engine(model, SPARSE, kv_cache_dtype=kind) as llm:
        found = [ask(llm, asked, TOKENS), ask(switched(llm, {**SPARSE, "selector": "lowbit"}), asked, TOKENS)]
    for one in found:
        assert one.tokens == expected.tokens
        check_counts(one, full=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_of_a_checkpoint_are_multiplied_by(model: Path, dtype: str) -> None:
    """Keys and values, in each packing that this processor has."""
    with engine(model, SPARSE, kv_cache_dtype="fp8", dtype=dtype) as llm:
        layer = next(layer for layer in layers(llm).values() if layer.impl.sparse)
        layer._k_scale_float, layer._v_scale_float = 0.02, 3.0
        heads, block, size = layer.impl.shape[0], layer.impl.shape[1], layer.impl.shape[2] // 2
        form = layer.impl.rows_dtype, heads, block, size, layer.impl.byte_floats
        packing = packing_of(layer, *form)
        assert packing == layer.impl.packing
        rows = torch.randn(2, block, heads, size).to(layer.impl.rows_dtype)
        cache = torch.zeros(1, heads, block, 2 * size, dtype=torch.uint8)
        adapters.write(layer, rows[0], rows[1], cache, torch.arange(block))
        held = read_as(layer, cache, packing, form[0], form[4])
        for read, written, scale in ((held.keys, rows[0], 0.02), (held.values, rows[1], 3.0)):
            found = read(torch.tensor([0]), block)[0].transpose(0, 1).float()
            torch.testing.assert_close(found, written.float(), rtol=0.13, atol=scale * 2**-6)
