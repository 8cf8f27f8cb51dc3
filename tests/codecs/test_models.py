"""Row codecs in the layers of a model: what they need of a layer reaches them, and codes of 8 bits change little."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from sparseattn import make_codec
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.sparse_cache import SparseCache
from tests.models.tiny import prompt, small

CODECS = ("kivi:bits=8", "rotatekv:bits=8,clip=1.0", "gear:bits=8", "think:ratio=0.0", "zipcache:high=8,low=8")


@pytest.mark.parametrize("spec", CODECS)
def test_a_model_decodes_over_rows_that_a_codec_keeps(spec: str) -> None:
    model, ids = small("llama"), prompt(200)
    with torch.no_grad():
        dense = model(input_ids=ids).logits[:, -1]
        with SparseCache(model, "quest:page=16", budget=None, sink=2, window=8, seal=64, rows=spec) as cache:
            model(input_ids=ids[:, :-1], use_cache=True, **cache_argument(cache))
            out = model(input_ids=ids[:, -1:], use_cache=True, **cache_argument(cache)).logits[:, -1]
            layer = next(iter(cache.sparse_layers.values())).rows
            assert repr(layer.codec) == repr(make_codec(spec))
            assert layer.stored.kept is not None
    assert float((out - dense).norm() / dense.norm()) < 0.05
