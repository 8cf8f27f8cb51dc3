"""What ranks keep, send and take by the model of cost."""

from __future__ import annotations

import pytest
import torch

from sparseattn.cost_model.links import Link
from sparseattn.cost_model.machine import Machine
from sparseattn.cost_model.model_shape import ModelShape
from sparseattn.cost_model.model_steps import Workload
from sparseattn.cost_model.rank_steps import Dealt, rank_steps
from sparseattn.selectors.registry import make_selector

METHODS = ["quest", "lowbit", "h2o"]


def test_ranks_divide_what_one_process_reads() -> None:
    """A rank of one is one process; of many, each reads and keeps a part, and sends what the formula says."""
    work = Workload(Machine.load("h100"), ModelShape.load("llama-3.1-8b"), 1 << 20, 1, torch.bfloat16)
    link = Link.of("infiniband")
    alone, eight, many = (rank_steps(Dealt(work, ranks, link), METHODS, 2048) for ranks in (1, 8, 64))
    assert alone[0].attention == work.dense_seconds()
    assert alone[1].attention == work.sparse_seconds(make_selector("quest"), 2048)[0]
    assert alone[0].link == alone[0].sent == 0
    for one, part in zip(alone[:3], eight[:3], strict=True):
        assert one.kv / 8 < part.kv < one.kv / 7
        assert part.read < one.read / 7
        assert one.seconds is not None
        assert part.seconds is not None
        assert part.seconds < one.seconds
    assert many[2].sent > eight[2].sent > eight[1].sent, "more ranks and single rows send more scores"
    union = rank_steps(Dealt(work, 8, link), ["lowbit"], 2048, exact=False)
    assert union[1].sent == union[0].sent == eight[0].sent
    assert "not dealt to ranks" in eight[3].reason


@pytest.mark.parametrize("text", ["nvlnk", "25", "-1,2", "nan,1", "25,10,3"])
def test_a_link_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="a link is one of nvlink, infiniband"):
        Link.of(text)
