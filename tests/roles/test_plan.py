"""Plans: the value and its file, and that a model, `eval` and vLLM take one that was made for them and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.load import reference_model
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.roles.fingerprint import fingerprint, of_folder
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.serving.vllm.settings import Settings, parse
from tests.command import run
from tests.models.tiny import prompt, small

MODEL = {"name": "some", "fingerprint": "0123456789abcdef"}
ROLES: dict[int, Any] = {0: "dense", 1: [Role("quest:page=4", 8), "window"], 2: Role("window", 16)}


def made_for(llama: Any, **changed: Any) -> Plan:
    own = {"name": "llama", "fingerprint": fingerprint(llama.named_parameters())}
    return Plan(ROLES, "mine", **{"model": own, "sink": 2, "window": 8, **changed})


@pytest.fixture(scope="module")
def llama() -> Any:
    return small("llama", num_attention_heads=4, num_key_value_heads=2)


# -- the value and the file --------------------------------------------------------------------------------------------


def test_a_file_gives_back_the_same_plan(tmp_path: Path) -> None:
    plan = Plan(ROLES, "mine", model=MODEL, sink=2, window=8, made={"bound": {"most": 0.01}})
    plan.save(tmp_path / "other.json")
    again = Plan.load(tmp_path / "other.json")
    assert (again.layers, again.name, again.model) == (plan.layers, "mine", MODEL)
    assert (again.sink, again.window, again.made) == (2, 8, {"bound": {"most": 0.01}})
    assert (again.source(), again.label()) == (plan.source(), "plan mine")
    assert repr(again).startswith("Plan(mine; 0: dense; 1: [quest:page=4 at 8, window]")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "sparseattn-roles"}, 'a JSON object with "format": "sparseattn-plan"'),
        ({"version": 2}, "its version is 2, this release reads 1"),
        ({"budget": 64}, "anything else in made; got 'budget'"),
        ({"model": {"name": "some"}}, "the model of a plan is .*got {'name': 'some'}"),
        ({"sink": -1}, "sink of a plan is rows, 0 or more, got -1"),
        ({"window": "64"}, "window of a plan is rows, 0 or more, got '64'"),
        ({"made": []}, r"made is an object, got \[\]"),
        ({"layers": []}, r"layers are an object of one layer or more, got \[\]"),
        ({"layers": {"1": "qest"}}, "layer 1: no selector is called 'qest'"),
    ],
    ids=str,
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "plan.json"
    record = {**Plan(ROLES, model=MODEL).record(), **change}
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=words) as error:
        Plan.load(path)
    assert str(error.value).startswith(f"{path} is no file of plan")
    for key in ("model", "sink", "window"):
        path.write_text(json.dumps({k: v for k, v in Plan(ROLES, model=MODEL).record().items() if k != key}))
        with pytest.raises(ValueError, match=f"it says nothing of {key}"):
            Plan.load(path)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_have_one_fingerprint_in_memory_and_in_a_folder(tmp_path: Path, tied: bool) -> None:
    one = small("llama", tie_word_embeddings=tied)
    print_ = fingerprint(one.named_parameters())
    one.save_pretrained(tmp_path)
    assert print_ in of_folder(tmp_path)
    assert fingerprint(one.to(torch.bfloat16).named_parameters()) == print_
    with torch.no_grad():
        one.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert fingerprint(one.named_parameters()) != print_
    with pytest.raises(ValueError, match=r"holds no \.safetensors files"):
        of_folder(tmp_path / "none")


# -- what takes it -----------------------------------------------------------------------------------------------------


def test_a_cache_by_a_plan_is_one_by_its_roles(llama: Any, tmp_path: Path) -> None:
    plan = made_for(llama)
    plan.save(tmp_path / "plan.json")
    ids = prompt()
    found = []
    for given in ({"plan": tmp_path / "plan.json"}, {"roles": Roles(ROLES), "sink": 2, "window": 8}):
        with SparseCache(llama, **given, seal=None) as cache:
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6}
            found.append((llama.generate(ids, **cache_argument(cache), **options).tolist(), str(cache.stats())))
    assert found[0] == found[1]
    assert list(cache.sparse_layers) == [1, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"selector": "exact"}, "plan mine names the method of every layer: give it, .* got 'exact'"),
        ({"selector": "quest"}, "plan mine names the method of every layer: give it, .* got 'quest'"),
        ({"roles": Roles(["dense"])}, "plan mine names the method of every layer"),
        ({"sink": 5}, "measured with a sink of 2 and a window of 8 rows, got 5 and 64: give it those"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_plan_is_refused(llama: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SparseCache(llama, plan=made_for(llama), **given)


def test_a_plan_for_another_model_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"made for the weights of some \(0123456789abcdef\), and .* has others"):
        SparseCache(llama, plan=made_for(llama, model=MODEL))
    deeper = Plan({**ROLES, 7: "window"}, "mine", model=made_for(llama).model)
    with pytest.raises(ValueError, match="layer 7 is none of them"):
        SparseCache(llama, plan=deeper)


def test_eval_compares_a_plan(tmp_path: Path) -> None:
    own = {"name": "reference", "fingerprint": fingerprint(reference_model().named_parameters())}
    Plan({0: "dense", 1: "dense", 2: Role("quest", 64), 3: "window"}, "mine", model=own).save(tmp_path / "plan.json")
    line = "eval --model reference --lengths 560 --task agreement --text alice --last 4 --samples 1 --budget 64"
    given = [f"{line} --no-figures --json", "--plan", tmp_path / "plan.json"]
    done = run(*given, "--selector", "quest", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["method"], one["budget"]) for one in records] == [("full", None), ("quest", "64"), ("plan mine", None)]
    _, quest, mine = records
    window = (4 + 64) / mine["context"]  # what waits for a page of quest is a few rows
    assert mine["bytes_share"] == pytest.approx((2 + quest["bytes_share"] + window) / 4, abs=0.02), "dense layers count"
    for more, words in (
        (["--window", "65"], "measured with a sink of 4 and a window of 64 rows, got 4 and 65"),
        (["--endpoint", "http://127.0.0.1:9"], "--endpoint cannot run --plan, --budget"),
    ):
        no = run(*given, *more, "--out", tmp_path / "no")
        assert no.exit_code == 2
        assert words in " ".join(no.output.split())
    Plan(["window"] * 4, "other", model=MODEL).save(tmp_path / "plan.json")
    no = run(*given, "--out", tmp_path / "no")
    assert "plan other was made for the weights of some" in " ".join(no.output.split())


# -- vLLM --------------------------------------------------------------------------------------------------------------

SERVED: dict[int, Any] = {0: "dense", 1: Role("quest", 64), 2: "window", 3: Role("mean:bits=8", 128)}


def test_an_engine_serves_layers_that_differ() -> None:
    settings = Settings.of_plan(Plan(SERVED, model=MODEL, sink=8, window=32), above=100)
    assert parse(json.loads(json.dumps(settings.to_dict()))) == settings
    assert (settings.sink, settings.window, settings.above, settings.dense_layers) == (8, 32, 100, 0)
    assert [settings.is_dense(layer) for layer in range(4)] == [True, False, False, False]
    assert [settings.make(layer).label() for layer in (1, 2, 3)] == ["quest", "window", "mean:bits=8"]
    assert [settings.pages(layer) for layer in (1, 2, 3)] == [4, 0, 8]
    assert settings.shape == (16, 16)
    with pytest.raises(ValueError, match="layers name every layer of full attention, and layer 4 is missing"):
        settings.is_dense(4)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({0: ["window", Role("quest", 64)]}, "layer 0: vLLM serves one method for all heads of a layer"),
        ({0: Role("quest", 64), 1: Role("lowbit:page=16", 64)}, "quest has 16 and 16, lowbit:page=16 has 16 and 64"),
        ({0: Role("window", 32)}, "layer 0: in vLLM a window has no budget"),
        ({0: Role("quest", "5%")}, "layer 0: in vLLM a budget is rows, got '5%' for quest"),
        ({0: "quest"}, "layer 0: in vLLM a budget is rows, got None for quest"),
        ({0: Role("lowbit:scales=8", 64)}, "layer 0: 'lowbit:scales=8' cannot be served: its 8-bit levels"),
        ({0: Role("exact", 64)}, "layer 0: vLLM's cache is kept by page"),
        ({0: "dense"}, "every layer is dense, so that nothing would be sparse"),
    ],
    ids=str,
)
def test_a_plan_that_no_engine_serves_is_refused(layers: dict[int, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings.of_plan(Plan(layers, model=MODEL))
    with pytest.raises(ValueError, match="layers say what each layer does: give them or budget"):
        parse({"layers": {"0": "window"}, "budget": 64})
