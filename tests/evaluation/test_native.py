"""Models with an index of their own in `eval`: full attention is without the index, and the index is a method."""

from __future__ import annotations

import pytest
import torch

from sparseattn.cli.eval_methods import methods
from sparseattn.codecs.registry import as_codec
from sparseattn.evaluation.tasks.compared import FORCED
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.run import measure
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.sparse_cache import restore
from tests.models.tiny_native import densely, native


@pytest.mark.parametrize("family", ["minimax_m3_vl", "glm_moe_dsa"])
def test_the_index_is_compared_with_attention_without_it(family: str) -> None:
    model, ids = native(family), torch.randint(3, 96, (1, 90), generator=torch.Generator().manual_seed(2))
    decoder = ModelDecoder(model, sink=0, window=1)
    prefill, tail = decoder.read(ids[0, :80].tolist()), ids[0, 80:].tolist()
    full = decoder.start(decoder.index(prefill, [], None), None).feed(tail)
    prompt = Prompt({"task": "agreement"}, ids[0, :80].tolist(), tail, expected=tail)
    compared = methods(["native", "exact"], "all", [90])
    assert [(method.label, method.written) for method in compared] == [
        ("full", None),
        ("native", None),
        ("exact", "all"),
    ]
    records = list(measure(prompt, compared, [FORCED], decoder, Tokens(None)))
    kl = {record["method"]: record["kl"] for record in records}
    assert kl["full"] == 0
    assert kl["exact"] == pytest.approx(0, abs=1e-6)
    assert kl["native"] > 1e-3
    restore(model)
    with torch.no_grad():
        expected = densely(model)(ids).logits[0, 80:]
    torch.testing.assert_close(full, expected, rtol=0, atol=1e-4)


def test_the_index_reads_rows_as_they_came() -> None:
    codec = as_codec("kivi:bits=4")
    with pytest.raises(ValueError, match="native reads rows as they came"):
        methods(["native"], "all", [90], codecs=[codec])
    compared = methods(["native", "exact"], "all", [90], codecs=[None, codec])
    assert [method.codec for method in compared if method.label == "native"] == [None]
