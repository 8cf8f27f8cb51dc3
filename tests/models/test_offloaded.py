"""Models whose weights accelerate keeps elsewhere between the passes of their layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from sparseattn.models.input_device import input_device
from sparseattn.models.sparse_cache import SparseCache
from tests.models.tiny import generate, padded, small


def test_inputs_go_where_the_first_part_runs() -> None:
    parts = [SimpleNamespace(), SimpleNamespace(_hf_hook=SimpleNamespace(execution_device="cuda:1"))]
    offloaded = SimpleNamespace(device=torch.device("meta"), modules=lambda: parts)
    assert input_device(offloaded) == torch.device("cuda:1")
    assert input_device(SimpleNamespace(device=torch.device("meta"), modules=lambda: parts[:1])).type == "cpu"
    assert input_device(small("llama")).type == "cpu"


def test_an_offloaded_model_decodes_and_has_no_fingerprint(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate, which offloads")
    inputs = padded()
    expected = small("llama").generate(**inputs, max_new_tokens=5, do_sample=False)
    model = accelerate.cpu_offload(small("llama"), execution_device=torch.device("cpu"))
    assert model.device.type == "meta"
    with SparseCache(model, "exact", None, window=4, seal=16) as cache:
        tokens, _ = generate(model, cache, inputs)
        assert torch.equal(tokens[:, : expected.shape[1]], expected[:, : tokens.shape[1]])
        with pytest.raises(ValueError, match="weights are offloaded, so they have no fingerprint"):
            cache.save(tmp_path / "cache.safetensors")
