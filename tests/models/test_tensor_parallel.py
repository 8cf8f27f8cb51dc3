"""Laws of a model whose heads processes share: its tokens are the whole model's, method by method."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from sparseattn.core.context import Heads, LayerContext
from sparseattn.models.errors import ModelError
from sparseattn.models.tensor_parallel import HeadShare
from sparseattn.roles.roles import Roles
from tests.models.tiny import small
from tests.ranks import found

COMPARING = ["exact:group=layer", "delta", "lessismore", "tova", "infllm", "kascade:anchors=[0]"]


def check(tmp_path: Path, generate: list[tuple[str, str]], refused: list[str], new: int) -> None:
    small("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "store").mkdir()
    names = {"model": str(tmp_path / "model"), "generate": generate, "refused": refused, "new": new}
    lives = found("tests.models.head_lives", tmp_path / "store", 2, names, 300)
    for selector, way in generate:
        for own in lives[f"{selector} {way}"]:
            assert own["tokens"], (selector, way, own)
            assert own["far"] < 1e-8, (selector, way, own)
            assert own["steps"][0] == own["steps"][1] > 0
        if selector != "roles":
            assert all(own["heads"] == [1] for own in lives[f"{selector} {way}"])
    for selector in refused:
        for said in lives[f"refused {selector}"]:
            assert "compares all 2 KV heads of a layer, and each of the 2 processes that share this model has 1" in said
    assert all(own == {"tokens": True, "groups": [0, 1]} for own in lives["drafts"])
    assert all("a prompt cache is of all heads of a layer" in said for said in lives["refused load"])
    assert all("3 processes cannot share the 2 KV heads" in said for said in lives["refused three"])
    assert lives["here"] == [[0, 2, 1], [1, 2, 1]]
    assert len({text for own in lives["fingerprints"] for text in own}) == 1


def test_two_processes_that_share_heads_say_what_one_does(tmp_path: Path) -> None:
    check(tmp_path, [("quest:page=8", "whole"), ("roles", "chunks")], ["lessismore"], new=8)


@pytest.mark.slow
def test_more_methods_and_ways(tmp_path: Path) -> None:
    methods = ["quest:page=8", "lowbit:rows=16", "mean:page=8", "snapkv", "h2o", "fier", "querypq:subspaces=4", "roles"]
    ways = ["whole", "chunks", "lookup"]
    # What drops rows takes no drafts back.
    pairs = [(one, way) for one in methods for way in ways if way != "lookup" or one not in ("snapkv", "h2o")]
    check(tmp_path, pairs, COMPARING, new=24)


def test_shares_of_roles_are_cut_to_the_heads_of_a_process() -> None:
    roles = Roles({0: ["quest", "window", "quest", "dense"]})
    here = HeadShare(1, 2)
    shares = here.of_shares(roles.shares(0, here.every(2)), 2)
    assert [(share.label, share.heads) for share in shares] == [
        ("quest", Heads((0,), 2)),
        ("dense", Heads((1,), 2)),
    ]
    told = [share.fresh(LayerContext(0, heads=here.heads(2))).layer_context.heads for share in shares]
    assert told == [Heads((2,), 4), Heads((3,), 4)], "files of artefacts number the heads of the whole layer"
    alone = HeadShare(0, 4)
    (share,) = alone.of_shares(roles.shares(0, 4), 1)
    assert share.heads is None
    assert share.fresh(LayerContext(0, heads=alone.heads(1))).layer_context.heads == Heads((0,), 4)


def test_heads_that_are_not_shared_evenly() -> None:
    def config(**_: Any) -> Any:
        return SimpleNamespace(num_key_value_heads=5, num_attention_heads=5)

    text = SimpleNamespace(get_text_config=config, _name_or_path="odd")
    model = SimpleNamespace(config=text, _tp_size=2, _device_mesh=SimpleNamespace(ndim=1, get_local_rank=lambda: 1))
    with pytest.raises(ModelError, match="odd has 5 KV heads, and 3 of them are in this one of 2 processes"):
        HeadShare.of(model, 3)
    assert HeadShare.of(model, 5) == HeadShare(), "a plan that leaves attention whole"
