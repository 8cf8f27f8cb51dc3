"""vLLM's engine on the CPU with its Triton kernels and ours interpreted: `python cuda_engine.py FOLDER interpreted`.

A script, because what it changes lasts for its process: vLLM is told that Triton runs here, and that its CPU attention
is our CUDA backend. With `planned` each layer has a budget of its own. With `stock` it is vLLM's own. The model is tiny
and random. The last line printed is JSON.

Every output of every sparse layer is compared with attention in torch over the keys and values that lie in the engine's
cache: with dense attention, or, where the budget leaves rows out, with what a `KVCache` with Quest reads of the same
rows. A phase with `fixed` runs steps of one token as a CUDA graph would: by the metadata of a step recorded before.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

PAGE, SINK, WINDOW, ABOVE = 16, 4, 20, 40
PROMPTS = (110, 140, 36)  # the last becomes long enough to be sparse while it decodes
SMALL = 2 * PAGE  # a budget below what the longer prompts hold
PLAN = {0: 3 * PAGE, 1: SMALL}  # budgets of the layers
TOKENS = 8

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "",  # ours would put its CPU backend in place
    "TRITON_INTERPRET": "1",
}


def as_on_cuda() -> None:
    """Before vLLM is imported."""
    import torch
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    from sparseattn.kernels import implementations

    choose = implementations.choose

    def on_a_gpu(
        impl: str | None,
        device: Any,
        dtype: Any,
        names: tuple[str, ...] = ("torch", "numba", "triton"),
        fallback: str = "torch",
    ) -> str:
        here = impl is None and "triton" in names and fallback == "torch"
        return choose("triton" if here else impl, device, dtype, names, fallback)

    implementations.choose = on_a_gpu
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from sparseattn.serving.vllm import counters, cuda
    from sparseattn.serving.vllm.plugin import CUDA_BACKEND

    counters.begin()  # as the plug-in does
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    assert AttentionBackendEnum.CUSTOM.get_class() is cuda.SparseTritonBackend
    register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM.get_path())


class Watch:
    """Compares what the backend computes with attention in torch, and counts what it saw."""

    def __init__(self) -> None:
        self.phase: dict[str, Any] = {}

    def begin(self, budget: int | dict[int, int]) -> dict[str, Any]:
        """Of all sparse layers, or of each by its number."""
        names = ("sparse", "dense", "mixed", "fixed", "left_out", "short_in_fixed", "rows_attended")
        self.phase = {"budget": budget, "worst": 0.0, **dict.fromkeys(names, 0)}
        return self.phase

    def install(self) -> None:
        from sparseattn.serving.vllm import cuda

        forward = cuda.SparseTritonImpl.forward
        watch = self

        def watched(impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any,
                    output: Any, **more: Any) -> Any:  # fmt: skip
            output.fill_(float("nan"))  # whatever is not written shows
            done = forward(impl, layer, query, key, value, cache, metadata, output, **more)
            if metadata is not None and impl.sparse is not None:
                watch.compare(impl, layer.layer_name, query, cache, metadata, output)
            return done

        cuda.SparseTritonImpl.forward = watched

    def compare(self, impl: Any, layer_name: str, query: Any, cache: Any, metadata: Any, output: Any) -> None:
        import torch

        phase, step = self.phase, metadata.step
        starts, rows = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        sparse = set()
        if step is not None and step.queries is not None:
            sparse = {starts.index(row) for row in step.queries.tolist()}
        elif step is not None:
            sparse = set(step.sparse.nonzero()[:, 0].tolist())
            phase["fixed"] += 1
            phase["short_in_fixed"] += len(rows) - len(sparse)
        phase["mixed"] += 0 < len(sparse) < len(rows)
        keys, values = cache.split(impl.head_size, dim=-1)
        for i, n in enumerate(rows):
            blocks = metadata.block_table[i].long()
            k, v = (held[blocks].transpose(0, 1).flatten(1, 2)[:, :n] for held in (keys, values))  # [H,n,D]
            asked = query[starts[i] : starts[i + 1]]  # [q,H*G,D]
            grouped = asked.view(len(asked), len(k), -1, impl.head_size).permute(1, 2, 0, 3)  # [H,G,q,D]
            if i in sparse:
                assert len(asked) == 1
                assert n > ABOVE
                budget = phase["budget"]
                layer = int(layer_name.split(".")[2])
                expected = self.quest(impl, grouped, k, v, budget[layer] if isinstance(budget, dict) else budget)
                phase["sparse"] += 1
            else:
                mask = torch.arange(n) <= torch.arange(n - len(asked), n)[:, None]
                logits = (grouped @ k[:, None].mT * impl.scale).masked_fill(~mask, -torch.inf)
                expected = logits.softmax(-1) @ v[:, None]
                phase["dense"] += 1
            expected = expected.permute(2, 0, 1, 3).flatten(1, 2)
            off = (output[starts[i] : starts[i + 1]] - expected).abs().max().item()
            assert off == off, f"request {i} of {len(rows)} got no output, or NaN"
            phase["worst"] = max(phase["worst"], off)

    def quest(self, impl: Any, query: Any, keys: Any, values: Any, budget: int) -> Any:
        """What `KVCache` reads of the same rows: the sink rounded up to a whole page, pages counted from row 0."""
        import torch

        from sparseattn import KVCache, Quest, decode

        n = keys.shape[1]
        cache = KVCache(Quest(PAGE), sink=PAGE, window=WINDOW, seal=PAGE)
        cache.append(keys[None].clone(), values[None].clone())
        held = (n - WINDOW) // PAGE * PAGE - PAGE  # rows to choose from
        if budget >= held:
            logits = (query @ keys[:, None].mT) * impl.scale
            self.phase["rows_attended"] += n
            return logits.softmax(-1) @ values[:, None]
        self.phase["left_out"] += 1
        self.phase["rows_attended"] += n - held + budget
        out = decode(query[None, :, :, 0], cache, budget, impl="reference")
        assert abs(impl.scale - keys.shape[2] ** -0.5) < 1e-9
        assert torch.isfinite(out).all()
        return out[0][:, :, None]


def record(builder: Any, most: int) -> None:
    """From now on the builder gives the metadata of the first step of each number of requests, as a graph has it."""
    from dataclasses import replace

    import torch

    from sparseattn.serving.vllm.cuda_step import FixedBuffers

    builder.fixed = FixedBuffers(builder.zones, 4, most, torch.device("cpu"))
    build, capture, recorded = builder.build, builder.build_for_cudagraph_capture, {}

    def replayed(prefix: int, common: Any, fast_build: bool = False) -> Any:
        if not builder._is_fixed(common):
            return build(prefix, common, fast_build)
        if common.num_reqs not in recorded:
            rows = common.seq_lens.clone()
            builder.build = build  # as in an engine, where recording is no step
            recorded[common.num_reqs] = capture(replace(common, max_seq_len=most))
            builder.build = replayed
            common.seq_lens.copy_(rows)  # vLLM records with short requests
        metadata, held = build(prefix, common, fast_build), recorded[common.num_reqs]
        for now, then in ((metadata, held), (metadata.step, held.step), (metadata.step.bounds, held.step.bounds)):
            for name, tensor in tensors(now).items():
                other = tensors(then)[name]
                assert (tensor.data_ptr(), tensor.shape) == (other.data_ptr(), other.shape), name
        return held

    builder.build = replayed


def tensors(of: Any) -> dict[str, Any]:
    import torch

    names = getattr(type(of), "__slots__", None) or vars(of)
    return {name: getattr(of, name) for name in names if isinstance(getattr(of, name), torch.Tensor)}


def builder_of(llm: Any) -> Any:
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    (groups,) = runner.attn_groups
    (group,) = groups
    return group.get_metadata_builder()


def tiny(folder: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=256, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)


def refusals(builder: Any) -> dict[str, str | None]:
    """What is said of layers and engines that cannot be served, beside what `engine_checks.settings_of` says of any."""
    from dataclasses import replace

    import torch

    from sparseattn.serving.vllm import cuda

    config = builder.vllm_config

    def why(spec: Any = builder.kv_cache_spec, **what: Any) -> str | None:
        usual = {"num_heads": 4, "head_size": 32, "scale": 1.0, "num_kv_heads": 2, "alibi_slopes": None}
        impl = cuda.SparseTritonImpl(**{**usual, "sliding_window": None, "kv_cache_dtype": "auto", **what})
        return cuda.why_dense_layer(SimpleNamespace(impl=impl, get_kv_cache_spec=lambda _: spec), config)

    said = {"layer": why()}
    for name, value in {
        "sliding_window": 64,
        "logits_soft_cap": 30.0,
        "alibi_slopes": [0.5] * 4,
        "sinks": torch.zeros(4),
        "kv_sharing_target_layer_name": "0",
        "attn_type": "encoder_only",
        "chunk_lookback": 1,
        "head_size": 512,
    }.items():
        said[name] = why(**{name: value})
    spec = builder.kv_cache_spec
    said["dtype"] = why(replace(spec, dtype=torch.float16))
    said["non_causal"] = why(replace(spec, non_causal=True))
    for name, change in {"unconfigured": ("additional_config", {}), "dbo": ("parallel_config", None)}.items():
        engine = SimpleNamespace(**{**vars(config), "model_config": config.model_config})
        if name == "dbo":
            change = ("parallel_config", SimpleNamespace(**{**vars(config.parallel_config), "use_ubatching": True}))
        setattr(engine, *change)
        try:
            cuda.given(engine)
        except ValueError as error:
            said[name] = str(error)
    try:
        settings = {"sparseattn": {"selector": "lowbit:rows=64,page=16", "budget": 64}}
        other = SimpleNamespace(**{**vars(config), "additional_config": settings})
        cuda.SparseTritonBuilder(spec, builder.layer_names, other, torch.device("cpu"))
    except ValueError as error:
        said["block"] = str(error)
    return said


def main(model: str, how: str) -> dict[str, Any]:
    if how != "stock":
        as_on_cuda()
    if not os.path.exists(os.path.join(model, "config.json")):
        tiny(model)
    import torch
    from vllm import LLM, SamplingParams

    full = 4096
    method = f"quest:page={PAGE}"
    settings: dict[str, Any] = {"sink": SINK, "window": WINDOW, "above": ABOVE}
    if how == "planned":
        settings["layers"] = {str(layer): {"method": method, "budget": budget} for layer, budget in PLAN.items()}
    else:
        settings |= {"selector": method, "budget": full, "dense_layers": 1}
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,  # prompts come in parts, beside requests that decode
        block_size=32,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        additional_config={} if how == "stock" else {"sparseattn": settings},
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(0, 128, (n,), generator=generator).tolist()} for n in PROMPTS]

    def generate() -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampling, use_tqdm=False)]

    if how == "stock":
        return {"tokens": generate()}
    from sparseattn.serving.vllm.counters import stats

    watch, builder = Watch(), builder_of(llm)
    watch.install()
    if how == "planned":
        phase = watch.begin(PLAN)
        return {"tokens": generate(), "counts": stats().to_dict(), **phase}
    layers = [layer.impl for layer in builder.vllm_config.compilation_config.static_forward_context.values()]
    result: dict[str, Any] = {
        "refusals": refusals(builder),
        "sparse_layers": [impl.sparse is not None for impl in layers],
        "graphs": type(builder).get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec).name,
    }
    for name, budget in (("full", full), ("small", SMALL), ("fixed", SMALL)):
        for impl in layers:
            if impl.sparse is not None:
                impl.sparse.pages = budget // PAGE
        if name == "fixed":
            record(builder, 256)
        result[name] = watch.begin(budget)
        before = stats()
        result[name]["tokens"] = generate()
        result[name]["counts"] = (stats() - before).to_dict()
    return result


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
