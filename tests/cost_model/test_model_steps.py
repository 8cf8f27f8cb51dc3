"""Models' decode steps on a machine: bytes by hand, what fits, weights, configs; and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseattn.cost_model.index_bytes import index_bytes
from sparseattn.cost_model.known_models import named
from sparseattn.cost_model.machine import Machine, MachineError
from sparseattn.cost_model.model_shape import ModelShape, ModelShapeError
from sparseattn.cost_model.model_steps import Workload, method_steps, record
from sparseattn.models.load import reference_folder
from tests import ROOT
from tests.cost_model.test_machine import run

LLAMA = ModelShape.load("llama-3.1-8b")
H100 = Machine.load("h100")
BFLOAT16 = torch.bfloat16


def workload(batch: int, context: int = 131_072, model: ModelShape = LLAMA) -> Workload:
    return Workload(H100, model, context, batch, BFLOAT16)


def test_a_model_of_eight_billion_on_80_gb() -> None:
    assert LLAMA.kv_bytes(1, BFLOAT16) == 128 * 1024
    assert LLAMA.kv_bytes(131_072, BFLOAT16) == 16 * 2**30
    assert not workload(8).fits()
    assert workload(3).fits()
    assert workload(1).largest_batch() == 3
    longest = workload(8).largest_context()
    assert longest is not None
    assert workload(8, longest).fits()
    assert not workload(8, longest + 1).fits()
    assert workload(1).weights_seconds() == pytest.approx((8.03e9 - 128_256 * 4096) * 2 / 3.35e12, rel=1e-3)


def test_a_step_is_its_attention_and_the_weights_once() -> None:
    one = workload(3)
    dense, lowbit = method_steps(one, ["lowbit"], 2048)
    shape = one.model.attention(3, BFLOAT16)
    assert dense.attention == pytest.approx(3 * 131_072 * 32 * 8 * shape.row_bytes / 3.35e12, rel=0.01)
    for step in (dense, lowbit):
        assert step.seconds == one.weights_seconds() + step.attention
    assert lowbit.index == pytest.approx(3 * 32 * 320 * 131_072, rel=1e-3)  # bytes a token of docs/lab/memory.md
    assert lowbit.times == dense.seconds / lowbit.seconds
    crowded = method_steps(replace(one, context=150_000), ["lowbit", "sparq"], 2048)
    assert [step.fits for step in crowded] == [True, True, False]  # SparQ keeps the keys a second time
    assert crowded[2].seconds is None


@pytest.mark.parametrize("name", named())
def test_parameters_are_those_that_were_published(name: str) -> None:
    known, weights = named()[name], ModelShape.load(name).weights
    assert weights.count / 1e9 == pytest.approx(known["billions"], rel=0.01)
    assert known["source"].startswith("https://")
    if "active_billions" in known:  # some count the input embedding among these, some do not
        both = (weights.active, weights.active + weights.parameters[0])
        assert min(abs(each / 1e9 / known["active_billions"] - 1) for each in both) < 0.02


def test_experts_and_windows() -> None:
    moe = ModelShape.load("qwen3-30b-a3b").weights
    assert moe.read(1) == pytest.approx(2 * moe.active)
    assert moe.read(1) < moe.read(8) < moe.read(10_000) == pytest.approx(moe.always + 128 * moe.expert)
    gemma = ModelShape.load("gemma3-4b")
    assert (gemma.full, gemma.sliding, gemma.window) == (5, 29, 1024)
    assert gemma.kv_bytes(131_072, BFLOAT16) == (5 * 131_072 + 29 * 1024) * 4 * 2 * 256 * 2
    packed = ModelShape.load("gpt-oss-20b")
    assert packed.weights.total / 2**30 == pytest.approx(12.8, abs=0.05)  # its model card's
    assert (packed.full, packed.sliding) == (12, 12)


def test_an_index_is_what_the_page_of_memory_says() -> None:
    quest = index_bytes("quest:int8=True", 8, 4, 128, BFLOAT16)
    assert (quest.token, quest.fixed) == (128, 4096)


def written(folder: Path, **config: Any) -> Path:
    known = named()["llama-3.1-8b"]["config"]
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**known, **config}.items() if value != "absent"}))
    return path


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("bridge", "hnsw", "retrieval")]  # to build


@pytest.mark.parametrize("name", ["lowbit", "ivf", *SLOW])
def test_an_index_that_grows_late_is_what_was_measured(name: str) -> None:
    """Lists and guides of these do not grow with the first rows as they do with the later ones."""
    memory = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())
    known = next(row["whole"] for row in memory["results"] if row["method"] == name)
    index = index_bytes(name, memory["heads"], memory["group"], memory["size"], BFLOAT16)
    assert index.at(memory["tokens"]) == pytest.approx(known, rel=0.02)


def test_a_config_of_a_folder(tmp_path: Path) -> None:
    path = written(tmp_path)
    for given in (path, tmp_path):
        assert replace(ModelShape.load(given), name=LLAMA.name, source=LLAMA.source) == LLAMA
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 4_000_000_000}}))
    assert ModelShape.load(written(tmp_path, quantization_config={"quant_method": "awq"})).weights.total == 4e9
    index.write_text(json.dumps({"metadata": []}))
    with pytest.raises(ModelShapeError, match=r"model\.safetensors\.index\.json\.metadata is an object"):
        ModelShape.load(path)
    shipped = ModelShape.load(reference_folder())
    assert (shipped.full, shipped.num_kv_heads, shipped.group, shipped.head_dim) == (4, 2, 4, 64)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_key_value_heads": "absent"}, "num_key_value_heads is missing"),
        ({"intermediate_size": "absent"}, "intermediate_size is missing"),
        ({"num_experts": 8}, "num_experts_per_tok is missing"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": "absent"}, "intermediate_size is missing"),
        ({"model_type": "gemma3_text"}, "head_dim is missing"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention"] * 32}, "is one of full_attention, sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"sliding_window": 4096}, "layer_types is missing"),
        ({"model_type": "mine"}, "safetensors"),
        ({"torch_dtype": "int8"}, "torch_dtype is one of"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq'"),
    ],
)
def test_a_config_that_tells_too_little(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelShapeError, match="does not tell what a decode step moves") as error:
        ModelShape.load(written(tmp_path, **config))
    assert said in str(error.value)


def test_a_data_sheet_is_a_profile(tmp_path: Path) -> None:
    sheet = {"name": "mine", "memory_gb": 48, "bandwidth_gb_s": 500, "tensor_tflops": 100, "vector_tflops": 20}
    sheet["source"] = "its box"
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**sheet, "launch_us": 5}))
    mine = Machine.load(path)
    assert (mine.name, mine.memory, mine.bandwidth, mine.predicted) == ("mine", 48e9, 500e9, True)
    assert mine.speeds["bfloat16"]["dense"].launch == pytest.approx(5e-6)
    for broken, said in (
        ({**sheet, "bandwith_gb_s": 1}, r"did you mean 'bandwidth_gb_s'"),
        ({key: value for key, value in sheet.items() if key != "memory_gb"}, "memory_gb is missing"),
        ({**sheet, "memory_gb": "48"}, "memory_gb is a number"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(MachineError, match=f"no profile of a machine: .*{said}"):
            Machine.load(path)


def test_the_command_says_what_fits_and_what_it_predicts(tmp_path: Path) -> None:
    asked = ["h100", "--model", "llama-3.1-8b", "--selector", "quest", "--selector", "saap"]
    text = " ".join(run(*asked, "--batch", "3").split())
    for words in (
        "Predicted from its data sheet, not measured",
        "17.2 GB for 131,072 tokens",
        "no prediction for saap",
    ):
        assert words in text
    several = ["--context", "32k,1M", "--batch", "1,8"]
    told = json.loads(run(*asked, *several, "--out", str(tmp_path / "told.json"), "--json"))
    assert told == json.loads((tmp_path / "told.json").read_text())
    assert told["predicted"] is True
    fits = {(each["context"], each["batch"]): each["fits"] for each in told["workloads"]}
    assert fits == {(32_768, 1): True, (32_768, 8): True, (1_048_576, 1): False, (1_048_576, 8): False}
    eight, last = told["workloads"][1], told["workloads"][-1]
    assert [step["selector"] for step in eight["steps"]] == ["dense", "quest", "saap"]
    assert eight["steps"][1]["seconds"] < eight["steps"][0]["seconds"]
    assert {step["seconds"] for step in last["steps"]} == {None}
    assert "This does not fit. What fits: 3 sequences" in " ".join(run(*asked, "--batch", "8").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["h100", "--model", "llama3.1-8b"], "did you mean 'llama-3.1-8b'?"),
        (["--model", "llama-3.1-8b"], "--model needs the name of a machine"),
        (["h100", "--model", "llama-3.1-8b", "--shape", "1,2,3"], "leave out --shape or --model"),
        (["h100", "--selector", "quest", "--context", "32k,128k"], "several values of --context"),
        (["h100", "--model", "llama-3.1-8b", "--batch", "0"], "--batch must be 1 or more"),
        (["h100", "--model", "llama-3.1-8b", "--selector", "retrieval"], "retrieval: the method searches in host"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments: list[str], said: str) -> None:
    out = " ".join(run(*arguments).split())
    assert out.startswith("2: ")
    assert said in out


def test_the_page_shows_what_the_command_says_now() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "gpu-h100.json").read_text())["workloads"]
    (shown,) = (one for one in kept if (one["model"], one["context"], one["batch"]) == ("llama-3.1-8b", 32_768, 8))
    one = workload(8, 32_768)
    told = record(one, method_steps(one, [step["selector"] for step in shown["steps"][1:]], 2048))
    assert told == shown, "make it anew: python -m scripts.evidence --only gpu-h100,gpu-rtx4090"
