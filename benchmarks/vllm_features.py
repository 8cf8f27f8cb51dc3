"""What of vLLM works beside the plug-in, and what is refused: each feature in an engine of its own.

``.venv-vllm/bin/python -m benchmarks.vllm_features --out FILE`` from the repository root. ``--only NAME`` (repeatable)
runs some, and keeps what the file has of the others. A feature that is served is asked the same prompts as stock vLLM
with that feature, at full budget, where answers must be equal, and at a small one, where steps must be sparse. A
feature that is refused leaves its sentence. Every engine runs in a process of its own, which cannot take the others
down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from sparseattn.cost_model.environment import machine, versions
from sparseattn.serving.vllm import installed
from sparseattn.utils import children
from sparseattn.utils.devices import features

PROMPTS = (600, 900, 1200)  # tokens
TOKENS = 32  # of an answer
SETTINGS: dict[str, Any] = {"selector": "quest:page=32", "sink": 4, "window": 64, "dense_layers": 2, "above": 500}
EVERY, FEW = 1 << 20, 256  # rows
SECONDS = 900  # that a feature may take
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "pages": {"type": "integer"}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}

Tokens = list[list[int]]  # of each answer


@dataclass(frozen=True)
class Feature:
    """A feature of vLLM: what an engine is given for it, and how it is asked.

    Args:
        name: in words, as the table has it.
        engine: arguments of `vllm.LLM`.
        sampling: arguments of `SamplingParams`.
        model: a name of `sparseattn models`.
        ask: how the prompts are asked, where it is not `generate`.
        apart: the engine's workers are processes, so that each setting has an engine of its own.
        environment: variables of the process.
        dense: it decodes by prefill alone, so that no step can be sparse.
        seed: of torch, before each setting.
    """

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    model: str = "smollm2"
    ask: Callable[[Any, list[list[int]], Feature], Tokens] | None = None
    apart: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    dense: bool = False
    seed: int | None = None


def _generate(llm: Any, prompts: list[list[int]], feature: Feature, **more: Any) -> Tokens:
    from vllm import SamplingParams

    if feature.seed is not None:
        torch.manual_seed(feature.seed)
    common = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **feature.sampling}
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(requests, SamplingParams(**common), use_tqdm=False, **more)
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


def _again(llm: Any, prompts: list[list[int]], feature: Feature) -> Tokens:
    """Ask twice: the second time the prefixes are cached."""
    first = _generate(llm, prompts, feature)
    return first + _generate(llm, prompts, feature)


def _loaded(llm: Any, prompts: list[list[int]], feature: Feature) -> Tokens:
    """Ask twice: the second time rows come from the disk."""
    first, before = _generate(llm, prompts, feature), _hits(llm)
    second = _generate(llm, prompts, feature)
    if _hits(llm) - before < min(map(len, prompts)):
        raise RuntimeError("the connector loaded nothing, so that nothing was tried")
    return first + second


def _hits(llm: Any) -> int:
    """Return the tokens whose rows a connector had."""
    return sum(int(one.value) for one in llm.get_metrics() if one.name == "vllm:external_prefix_cache_hits")


def _beams(llm: Any, prompts: list[list[int]], feature: Feature) -> Tokens:
    from vllm.sampling_params import BeamSearchParams

    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    outputs = llm.beam_search([{"prompt_token_ids": ids} for ids in prompts], beams)
    return [list(beam.tokens) for output in outputs for beam in output.sequences]


def _structured(llm: Any, prompts: list[list[int]], feature: Feature) -> Tokens:
    """Ask for JSON of a schema, and check that every answer that ended is."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = llm.get_tokenizer()
    tail = tokenizer.encode("\n\nThe title and the number of pages, as JSON: ")
    options = SamplingParams(temperature=0, max_tokens=TOKENS, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    outputs = llm.generate([{"prompt_token_ids": ids + tail} for ids in prompts], options, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    for answer in answers:
        if answer.finish_reason == "stop":
            json.loads(answer.text)
        elif not answer.text.lstrip().startswith("{"):
            raise RuntimeError(f"an answer that is not of the schema: {answer.text!r}")
    return [list(answer.token_ids) for answer in answers]


def _adapted(llm: Any, prompts: list[list[int]], feature: Feature) -> Tokens:
    from vllm.lora.request import LoRARequest

    folder = Path(tempfile.mkdtemp(prefix="adapter-"))
    _write_adapter(folder, llm.llm_engine.vllm_config.model_config.hf_text_config)
    adapted = _generate(llm, prompts, feature, lora_request=LoRARequest("random", 1, str(folder)))
    if adapted == _generate(llm, prompts, feature):
        raise RuntimeError("the adapter changes no token, so that nothing was tried")
    return adapted


def _write_adapter(folder: Path, config: Any) -> None:
    """Write a random adapter of rank 8 for queries and values, in the form of peft."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    size = config.hidden_size // config.num_attention_heads
    widths = {"q_proj": config.num_attention_heads * size, "v_proj": config.num_key_value_heads * size}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(8, config.hidden_size, generator=generator) * 0.05
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(facts | {"task_type": "CAUSAL_LM"}))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFT = {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 2}
ROWS = Path(tempfile.gettempdir()) / f"sparseattn-rows-{os.getpid()}"  # of the process that serves
CONNECTOR = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": str(ROWS)},
}
DEALT = {"decode_context_parallel_size": 2}
EVEN = "gemma3-270m"  # whose heads two processes can share: SmolLM2 has nine
TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
FEATURES = (
    Feature("chunked prefill", {"max_num_batched_tokens": 256}),
    Feature("prefix caching", {"enable_prefix_caching": True}, ask=_again),
    Feature("KV connectors", {"kv_transfer_config": CONNECTOR, "disable_log_stats": False}, ask=_loaded),
    Feature("several samples (`n`)", sampling={"n": 3, "temperature": 1.0}, seed=5),
    Feature("beam search", {"enable_prefix_caching": True}, ask=_beams, dense=True),
    Feature("structured output (JSON schema)", ask=_structured),
    Feature("log-probabilities of answers", sampling={"logprobs": 3}),
    Feature("LoRA adapters", {"enable_lora": True, "max_lora_rank": 8}, ask=_adapted),
    Feature("speculative decoding, `ngram`", {"speculative_config": NGRAM}),
    Feature("speculative decoding, `draft_model`", {"speculative_config": DRAFT}),
    Feature("tensor parallel 2", {"tensor_parallel_size": 2}, model=EVEN, apart=True, environment=TWO),
    Feature("data parallel 2", {"data_parallel_size": 2}, apart=True, environment=TWO),
    Feature("sliding windows (Gemma 3)", model="gemma3-270m"),
    Feature("pipeline parallel 2", {"pipeline_parallel_size": 2}, apart=True, environment=TWO),
    Feature("FP8 cache", {"kv_cache_dtype": "fp8_e5m2"}),
    Feature("KV offloading", {"kv_offloading_size": 1}),
    Feature("decode context parallel 2", {**DEALT, "tensor_parallel_size": 2}, model=EVEN, apart=True, environment=TWO),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a feature's name, or a part of it")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="the record", required="--child" not in sys.argv)
    options = parser.parse_args()
    if options.child is not None:
        try:
            print("\n" + json.dumps(_tried(FEATURES[options.child], json.loads(options.budget))))
        finally:
            shutil.rmtree(ROWS, ignore_errors=True)
        return
    tried = []
    for number, feature in enumerate(FEATURES):
        if options.only is None or any(part in feature.name for part in options.only):
            tried.append(_outcome(number, feature))
            print(json.dumps(tried[-1]), flush=True)
    if options.only is not None and options.out.exists():
        before, anew = json.loads(options.out.read_text()), {row["name"] for row in tried}
        tried += [row for row in (*before["served"], *before["refused"]) if row["name"] not in anew]
        names = [feature.name for feature in FEATURES]
        tried.sort(key=lambda row: names.index(row["name"]))
    found = installed.distribution()
    assert found is not None
    record = {
        "vllm": found[1],
        "dtype": "float32",
        "settings": {**SETTINGS, "budget": FEW},
        "prompts": list(PROMPTS),
        "tokens": TOKENS,
        "served": [row for row in tried if "refused" not in row],
        "refused": [row for row in tried if "refused" in row],
        "machine": machine(),
        "features": features(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    records.save(record, options.out)


def _outcome(number: int, feature: Feature) -> dict[str, Any]:
    """Return a row of the record: what engines in processes of their own did."""
    row: dict[str, Any] = {"name": feature.name, "model": feature.model}
    answers: dict[str, dict[str, Any]] = {}
    for settings in [["stock"], ["full"], ["few"]] if feature.apart else [["stock", "full", "few"]]:
        if "error" not in answers.get("full", {}):
            answers |= _child(number, settings, feature)
    stock, full = answers["stock"], answers["full"]
    if "error" not in full and "error" in stock:
        raise RuntimeError(f"{feature.name}: stock vLLM fails where this is served: {stock['error']}")
    if "error" in full:
        row["refused"] = full["error"]
        row["stock"] = stock.get("error") or "runs"
        return row
    few = answers["few"]
    if "error" in few or (few["sparse_steps"] == 0) != feature.dense or stock["sparse_steps"]:
        raise RuntimeError(f"{feature.name}: {few}")
    row["answers"] = len(stock["tokens"])
    row["answers_equal"] = sum(a == b for a, b in zip(stock["tokens"], full["tokens"], strict=True))
    row["full"] = {name: full[name] for name in ("sparse_steps", "share")}
    row["few"] = {name: few[name] for name in ("sparse_steps", "share")}
    row["stock_sparse_steps"] = stock["sparse_steps"]
    return row


def _child(number: int, settings: Sequence[str], feature: Feature) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.vllm_features", "--child", str(number)]
    around = {**os.environ, **children.environment({}), **feature.environment, "VLLM_LOGGING_LEVEL": "ERROR"}
    around["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(feature.apart))
    try:
        done = subprocess.run(
            [*command, "--budget", json.dumps(settings)], env=around, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {name: {"error": f"no answer in {SECONDS} seconds"} for name in settings}
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    why = _reason(done.stderr)
    if len(settings) == 1:
        return {settings[0]: {"error": why}}
    each = {name: _child(number, [name], feature)[name] for name in settings if name != "few"}
    return each if "error" in each["full"] else each | _child(number, ["few"], feature)


def _reason(stderr: str) -> str:
    """Return our own sentence if vLLM's configuration was refused, or the last line that names an error."""
    if refused := re.findall(r"Value error, (.+?) \[type=", stderr, re.DOTALL):
        return " ".join(refused[-1].split())
    lines = [line.strip() for line in stderr.splitlines()]
    named = [line for line in lines if "sparseattn" in line and "Error" in line] or [
        line for line in lines if "Error: " in line
    ]
    return named[-1] if named else (lines[-1] if lines else "it ended without a word")


def _tried(feature: Feature, settings: Sequence[str]) -> dict[str, Any]:
    """Return what each of some settings answered, in this process."""
    from sparseattn.models.load import folder_of
    from sparseattn.serving.vllm.settings import parse

    given = {
        "model": str(folder_of(feature.model)),
        "dtype": "float32",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 1 << 29,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **feature.engine,
    }
    draft = given.get("speculative_config", {})
    if draft.get("model") == feature.model:
        given["speculative_config"] = {**draft, "model": given["model"]}
    known = {"stock": None, **{name: parse({**SETTINGS, "budget": budget}) for name, budget in BUDGETS.items()}}
    first = known["full"] if len(settings) > 1 else known[settings[0]]
    if first is not None:
        given["additional_config"] = {"sparseattn": first.to_dict()}
    if "data_parallel_size" in given:
        return {settings[0]: asyncio.run(_several_engines(given, feature))}
    from vllm import LLM

    llm = LLM(**given)
    prompts = _prompts(llm.get_tokenizer())
    found = {}
    for name in settings:
        if not feature.apart:
            from sparseattn.serving.vllm import cpu

            if len(settings) > 1:
                cpu.switch(known[name])
        found[name] = _counted(lambda: (feature.ask or _generate)(llm, prompts, feature))
    return found


BUDGETS = {"full": EVERY, "few": FEW}


def _prompts(tokenizer: Any) -> list[list[int]]:
    from sparseattn.traces.texts import read_named

    ids = tokenizer.encode(read_named("workshop"))
    return [ids[at : at + count] for at, count in enumerate(PROMPTS)]


def _counted(asked: Callable[[], Tokens]) -> dict[str, Any]:
    from sparseattn.serving.vllm.counters import stats

    before = stats()
    tokens = asked()
    counts = stats() - before
    share = round(counts.share, 4) if counts.sparse_steps else None
    return {"tokens": tokens, "sparse_steps": counts.sparse_steps, "share": share}


async def _several_engines(given: dict[str, Any], feature: Feature) -> dict[str, Any]:
    """Ask engines that share the requests: vLLM has that behind its asynchronous door alone."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from sparseattn.serving.vllm.counters import stats

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    try:
        prompts = _prompts(engine.get_tokenizer())
        options = SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )

        async def answer(number: int, ids: list[int]) -> list[int]:
            tokens: list[int] = []
            async for output in engine.generate({"prompt_token_ids": ids}, options, request_id=str(number)):
                tokens = list(output.outputs[0].token_ids)
            return tokens

        before = stats()
        tokens = await asyncio.gather(*[answer(number, ids) for number, ids in enumerate(prompts)])
        counts = stats() - before
    finally:
        engine.shutdown()
    share = round(counts.share, 4) if counts.sparse_steps else None
    return {"tokens": list(tokens), "sparse_steps": counts.sparse_steps, "share": share}


if __name__ == "__main__":
    main()
