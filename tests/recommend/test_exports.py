"""Plans as other projects' settings: what is written, what is said to differ, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparseattn.cli.recommend_options import Project
from sparseattn.recommend.exports import FORMATS, Exported, NoExportError, export_plan
from sparseattn.roles.plan import Plan

# The fields of `RocketSparseAttentionConfig` and `SkipSoftmaxAttentionConfig` in TensorRT-LLM's llm_args.py (1.3).
ROCKET = {"algorithm", "seq_len_threshold", "window_size", "kernel_size", "topr", "topk", "prompt_budget", "page_size"}
SKIP = {"algorithm", "threshold_scale_factor", "target_sparsity"}


def plan(*roles: Any, sink: int = 0, window: int = 1) -> Plan:
    return Plan(list(roles), "mine", model={"name": "m", "fingerprint": "f"}, sink=sink, window=window)


def skip(budget: Any = "all") -> dict[str, Any]:
    return {"method": "skipsoftmax:scale=40.0", "budget": budget}


def test_skip_softmax_has_the_same_threshold_everywhere() -> None:
    made = export_plan(plan(skip(), skip()), "trtllm")
    config = made.settings["sparse_attention_config"]
    assert set(config) <= SKIP
    assert config["threshold_scale_factor"] == {"prefill": 0.0, "decode": 40.0}
    assert made.differs == ()
    made = export_plan(plan("dense", skip(512), skip(512), sink=4), "modelopt")
    (group,) = made.settings["sparse_attention_config"]["config_groups"].values()
    assert _modelopt_threshold(group, tokens=1000) == pytest.approx(40.0 / 1000)
    assert group["ignore"] == ["layers.0.self_attn"]
    assert [re.search("sink and window|at most 512 rows", why) is not None for why in made.differs] == [True, True]


def _modelopt_threshold(group: dict[str, Any], tokens: int) -> float:
    """What its formula, evaluated as it is written, gives for a decoded token."""
    factor = group["threshold_scale_factor"]
    assert "prefill" not in factor  # dense
    names = {**factor["decode"], "target_sparsity": group["target_sparsity"]["decode"]}
    from math import exp

    return float(eval(factor["formula"], {"exp": exp}, names)) / tokens


def test_rocketkv_in_pages() -> None:
    role = {"method": "rocketkv:page=4,channels=64,prompt=2048", "budget": 256}
    config = export_plan(plan(role, role), "trtllm").settings["sparse_attention_config"]
    assert set(config) - {"kt_cache_dtype"} <= ROCKET
    assert (config["topk"], config["page_size"], config["topr"], config["prompt_budget"]) == (64, 4, 64, 2048)
    assert (config["window_size"], config["kernel_size"]) == (32, 63)


@pytest.mark.parametrize(
    ("roles", "to", "words"),
    [
        (["lowbit", "lowbit"], "trtllm", "TensorRT-LLM has no method like lowbit"),
        (["lowbit"], "modelopt", "Model Optimizer has no method like lowbit"),
        ([skip()], "sglang", "SGLang has no method like skipsoftmax"),
        (["doublesparsity"], "sglang", "one list for a KV head"),
        (["hata"], "ucm", "ranks whole blocks"),
        (["dense", skip()], "trtllm", "leaves layers 0 dense"),
        ([skip(), "quest"], "trtllm", "has quest, skipsoftmax"),
        ([["quest", "dense"]], "trtllm", "without --by head"),
        (["dense"], "modelopt", "has none"),
        ([{"method": "rocketkv", "budget": 256}], "trtllm", "prompt=ROWS.*channels=N"),
        ([{"method": "skipsoftmax:scale=0.0", "budget": 8192}], "modelopt", "skips nothing"),
    ],
)
def test_what_is_refused(roles: list[Any], to: str, words: str) -> None:
    with pytest.raises(NoExportError, match=words):
        export_plan(plan(*roles), to)


def test_formats_are_those_of_the_command() -> None:
    assert [project.value for project in Project] == list(FORMATS)
    with pytest.raises(ValueError, match="exported to trtllm, modelopt, sglang, ucm, got 'mine'"):
        export_plan(plan(skip()), "mine")
    assert Exported({}, ()).differs == ()
