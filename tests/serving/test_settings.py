"""What vLLM's plug-in is told, and what it refuses, as far as that can be seen without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparseattn import Quest
from sparseattn.core.activity import Activity, LayerActivity
from sparseattn.selectors.abilities import Evicts
from sparseattn.selectors.tokens.querypq import QueryPQ
from sparseattn.serving.vllm import counters, engine_checks, installed
from sparseattn.serving.vllm.block_codes import BlockCodes
from sparseattn.serving.vllm.counters import stats
from sparseattn.serving.vllm.mismatch import Mismatch
from sparseattn.serving.vllm.settings import VARIABLE, Settings, configured, parse

GIVEN = {"selector": "quest", "budget": 2048}


class Dropping(Evicts, Quest):
    def held(self) -> None:
        return None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("quest", r'"sparseattn" is a JSON object such as .* got \'quest\''),
        ({"budget": 64}, "\"sparseattn\" needs 'selector', such as"),
        ({"selector": "quest"}, "\"sparseattn\" needs 'budget', such as"),
        ({**GIVEN, "budgt": 1}, r"no setting 'budgt' \(did you mean 'budget'\?\); it takes selector, budget, sink"),
        ({**GIVEN, "budget": "64"}, r"budget is a whole number from 1 to 1e\+15, got '64'"),
        ({**GIVEN, "above": True}, 'above is rows or "auto", got True'),
        ({**GIVEN, "selector": 3}, "selector is text, got 3"),
        ({**GIVEN, "window": 0}, "window is a whole number from 1 to .*, got 0"),
        ({**GIVEN, "sink": -1}, "sink is a whole number from 0 to .*, got -1"),
        ({**GIVEN, "selector": "qest"}, r"no selector is called 'qest' \(did you mean 'quest'"),
        ({**GIVEN, "selector": "quest:pages=16"}, "pages"),
        ({**GIVEN, "selector": "exact"}, r"kept by page, and exact has another kind of index: serve quest"),
        ({**GIVEN, "selector": "querypq"}, "'querypq' cannot be served: its codes are made for one prompt"),
        ({**GIVEN, "per_request": 1}, "per_request is true or false, got 1"),
        ({**GIVEN, "max_budget": 0}, "max_budget is a whole number from 1 to .*, got 0"),
        ({**GIVEN, "max_budget": 15}, "max_budget is 16 rows or more, a page of quest, got 15"),
        ({**GIVEN, "max_budget": 64, "per_request": False}, "max_budget 64 limits what requests ask, and per_request"),
        ({**GIVEN, "selector": "quest:int8=True"}, "cannot be served: its 8-bit bounds have one step for a channel"),
        ({**GIVEN, "selector": "lowbit:page=16,scales=8"}, "cannot be served: its 8-bit levels are on a grid"),
        (
            {**GIVEN, "selector": f"{__name__}:Dropping"},
            f"'{__name__}:Dropping' drops rows, and blocks",
        ),
        ({**GIVEN, "budget": 15}, "quest reads whole pages of 16 rows, so the budget is at least that, got 15"),
    ],
    ids=str,
)
def test_settings_are_refused_in_a_sentence(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(given)


def test_the_environment_is_asked_where_the_configuration_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert configured({}) is None
    assert configured({"another": 1}) is None
    monkeypatch.setenv(VARIABLE, json.dumps(GIVEN))
    assert configured(None) == configured({}) == Settings("quest", 2048)
    assert configured({"sparseattn": {**GIVEN, "budget": 64}}) == Settings("quest", 64)
    monkeypatch.setenv(VARIABLE, "quest")
    with pytest.raises(ValueError, match=f"{VARIABLE} is no JSON .*: 'quest'"):
        configured({})


class Config(SimpleNamespace):
    """What is read of vLLM's, of a Llama of four layers."""

    def __init__(self, **changed: Any) -> None:
        kinds = changed.pop("layer_types", None)
        text = SimpleNamespace() if kinds is None else SimpleNamespace(layer_types=kinds)
        model = {"use_mla": False, "runner_type": "generate", "is_attention_free": False, "is_hybrid": False,
                 "hf_text_config": text, "disable_sliding_window": False, "max_model_len": 32768,
                 "get_total_num_hidden_layers": lambda: 4}  # fmt: skip
        cache = {"cache_dtype": "auto", "block_size": 128, "enable_prefix_caching": True, "mamba_cache_mode": "none",
                 "kv_offloading_size": None, "kv_cache_dtype_skip_layers": []}  # fmt: skip
        parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
                    "pipeline_parallel_size": 1, "tensor_parallel_size": 1}  # fmt: skip
        parts = {"model_config": model, "cache_config": cache, "parallel_config": parallel}
        for part in parts.values():
            part.update({name: changed.pop(name) for name in list(changed) if name in part})
        given = {"additional_config": {"sparseattn": {**GIVEN, **changed.pop("settings", {})}},
                 "kv_transfer_config": None, "speculative_config": None,
                 "device_config": SimpleNamespace(device_type="cpu")}  # fmt: skip
        super().__init__(**{**given, **{name: SimpleNamespace(**part) for name, part in parts.items()}, **changed})


def test_an_engine_whose_sequences_all_stay_dense_is_refused() -> None:
    says = "--above 8000 keeps every sequence dense: the longest sequence of this engine"
    with pytest.raises(ValueError, match=says):
        engine_checks.settings_of(Config(max_model_len=8000))


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.0")


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """As if so."""
    monkeypatch.setattr(installed, "distribution", lambda: None if version is None else ("vllm", version))


def test_an_engine_that_can_be_served_gives_its_settings() -> None:
    assert engine_checks.settings_of(Config()) == Settings("quest", 2048)
    assert engine_checks.settings_of(Config(model_config=None)) == Settings("quest", 2048)
    assert engine_checks.settings_of(Config(additional_config={}, use_mla=True)) is None
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert engine_checks.settings_of(Config(layer_types=kinds)) == Settings("quest", 2048)
    assert engine_checks.settings_of(Config(kv_transfer_config="given", cache_dtype="fp8")) is not None
    assert engine_checks.settings_of(Config(mamba_cache_mode="align", enable_prefix_caching=False)) is not None
    assert engine_checks.settings_of(Config(layer_types=["hybrid"] * 4, is_hybrid=True, block_size=24)) is not None


@pytest.mark.parametrize("method", engine_checks.DRAFTS)
def test_drafts_that_were_tried_are_served(method: str) -> None:
    drafts = SimpleNamespace(method=method, draft_model_config=None)
    assert engine_checks.settings_of(Config(speculative_config=drafts)) == Settings("quest", 2048)


CUDA = SimpleNamespace(device_type="cuda")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"kv_transfer_config": "given", "device_config": CUDA},
            "on cuda it does not: start vLLM without --kv-transfer-config",
        ),
        ({"kv_offloading_size": 1.0}, "vLLM itself offloads the cache of GPUs alone"),
        (
            {"kv_offloading_size": 1.0, "device_config": CUDA},
            "on cuda sparseattn's index does not notice rows that come back",
        ),
        ({"settings": {"selector": "tailed"}, "device_config": CUDA}, "tails are estimated on CPUs alone"),
        (
            {"speculative_config": SimpleNamespace(method="eagle")},
            "drafts of the method 'eagle' were not tried with .* a method of ngram, draft_model, or start without it",
        ),
        ({"speculative_config": SimpleNamespace(method="suffix")}, "drafts of the method 'suffix' were not tried"),
        (
            {"speculative_config": SimpleNamespace(method="ngram"), "device_config": CUDA},
            "on CPUs alone, got the method 'ngram' on cuda: start vLLM without --speculative-config",
        ),
        (
            {"settings": {"max_budget": 4096}, "device_config": CUDA},
            "on CPUs alone, so that --max-budget 4096 limits nothing on cuda: leave it out",
        ),
        (
            {"cache_dtype": "fp8_e4m3", "device_config": CUDA},
            "with kv_cache_dtype auto, got kv_cache_dtype fp8_e4m3 on cuda",
        ),
        ({"cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["1"]}, "with a cache of 8 bits all layers have it"),
        ({"pipeline_parallel_size": 2}, "start it without --pipeline-parallel-size, got 2"),
        (
            {"settings": {"selector": "lowbit"}, "device_config": CUDA},
            "single rows are read on CPUs alone, and 'lowbit' chooses them",
        ),
        ({"decode_context_parallel_size": 2}, "context parallelism splits a sequence over ranks"),
        ({"use_mla": True}, "this model's attention is MLA"),
        ({"runner_type": "pooling"}, "this model decodes nothing"),
        ({"is_attention_free": True}, "this model has no attention"),
        ({"mamba_cache_mode": "align"}, "start vLLM with --no-enable-prefix-caching"),
        ({"settings": {"dense_layers": 4}}, r"with dense_layers 4 \(it has 4 of full attention\): start vLLM with"),
        ({"layer_types": ["sliding_attention"] * 4}, r"with dense_layers 2 \(it has 0 of full attention\)"),
        ({"layer_types": ["full_attention"] * 2}, r"with dense_layers 2 \(it has 2 of full attention\)"),
        (
            {"settings": {"selector": "quest:page=8"}},
            "pages are a multiple of 16 rows, or single rows, got 8 from 'quest:page=8'",
        ),
        ({"settings": {"selector": "lowbit:page=16"}, "block_size": 96}, "a --block-size that is a multiple of 64"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_is_refused_in_a_sentence(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine_checks.settings_of(Config(**changed))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.26.3", "serves with vLLM 0.27 to 0.32, whose cache it knows, and this is vllm 0.26.3"),
        ("0.9.12", "and this is vllm 0.9.12"),
        (None, "serves with vLLM 0.27 to 0.32, and none is installed here"),
    ],
)
def test_an_older_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    install(monkeypatch, version)
    with pytest.raises(ValueError, match=said):
        engine_checks.settings_of(Config())
    assert engine_checks.settings_of(Config(additional_config={})) is None


@pytest.mark.parametrize("version", ["0.27.0", "0.32.7", "0.33.0", "0.270.1", "1.0.0rc1", "0.0.0", "dev"])
def test_a_newer_vllm_is_served_and_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    assert engine_checks.settings_of(Config()) == Settings("quest", 2048)
    tried = version in ("0.27.0", "0.32.7")
    said = f"this is vllm {version}, and the newest vLLM that sparseattn was tried with is 0.32"
    assert installed.newer_than_tried() == (None if tried else said)


def test_a_configuration_that_is_not_known_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(counters.FOLDER, str(tmp_path))
    config = Config()
    del config.parallel_config
    said = "vllm 0.32.0 is not as sparseattn knows vLLM .AttributeError: .* with --on-mismatch stock"
    with pytest.raises(Mismatch, match=said):
        engine_checks.settings_of(config)
    assert counters.mismatches() == []
    config.additional_config["sparseattn"]["on_mismatch"] = "stock"
    assert engine_checks.settings_of(config) is None
    assert len(counters.mismatches()) == 1


def test_the_largest_budget_of_requests_is_said_where_there_is_one() -> None:
    assert "max_budget" not in parse(GIVEN).to_dict()
    limited = parse({**GIVEN, "max_budget": 4096})
    assert limited.max_budget == 4096
    assert parse(limited.to_dict()) == limited


def test_what_to_do_on_a_mismatch_is_one_of_two() -> None:
    assert parse({**GIVEN, "on_mismatch": "stock"}).to_dict()["on_mismatch"] == "stock"
    assert "on_mismatch" not in parse({**GIVEN, "on_mismatch": "refuse"}).to_dict()
    with pytest.raises(ValueError, match='on_mismatch is "refuse" or "stock", got \'dense\''):
        parse({**GIVEN, "on_mismatch": "dense"})


def test_counts_of_all_processes_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(counters.FOLDER, str(tmp_path))
    assert stats() == Activity()
    own = counters.Counter()
    own.add(0, rows_read=3, sparse_steps=1)
    own.add(2, rows_read=4, rows_held=10)
    other = counters.LAYER.pack(*range(len(counters.NAMES)))
    (tmp_path / "1.counts").write_bytes(other + bytes((counters.LAYERS - 1) * len(other)))
    (tmp_path / "2.counts").touch()  # of a process that has just begun
    first = LayerActivity(1, 1, 5, 3, 4, 5, 6)
    assert stats() == Activity({0: first, 2: LayerActivity(rows_read=4, rows_held=10)})
    assert stats().share == 9 / 13
    assert (stats() - Activity({0: LayerActivity(rows_read=2)})).rows_read == 7
    assert Activity.from_dict(stats().to_dict()) == stats()
    monkeypatch.setenv(counters.FOLDER, str(tmp_path / "ended"))
    assert stats() == Activity()


def test_codes_of_a_file_choose_single_rows_alone() -> None:
    for page, wanted in ((1, None), (16, "codes choose single rows there: leave out page")):
        method = QueryPQ(page=page)
        method.artefact = "codes.safetensors"  # which is read when a layer asks
        why = BlockCodes(method).why_not_shared()
        assert why is None if wanted is None else wanted in str(why)
