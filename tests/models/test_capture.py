"""Capture: what a trace holds is what the model's attention saw, for random tiny models of several families."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import run

transformers = pytest.importorskip("transformers")

from sparseattn.cli import inputs  # noqa: E402
from sparseattn.evaluation import builtin_traces  # noqa: E402
from sparseattn.models import capture as recording  # noqa: E402
from sparseattn.models import load as models  # noqa: E402
from sparseattn.models.capture import capture  # noqa: E402
from sparseattn.models.errors import ModelError  # noqa: E402
from sparseattn.models.load import encode, load_model  # noqa: E402
from sparseattn.traces.trace import Trace, TraceError, TraceLayer  # noqa: E402
from tests.models.tiny import COMMON, FAMILIES, random_model  # noqa: E402

T = 70


def tiny(family: str, **changes: Any) -> Any:
    model = random_model(family, **changes)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases, which would be ones and zeros
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


def text(tokens: int = T) -> torch.Tensor:
    return torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(1))


def observed(model: Any, ids: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    """Inputs and outputs of the submodules of every attention layer in one plain forward pass."""
    seen: dict[int, dict[str, torch.Tensor]] = {}
    handles = []
    for module in model.modules():
        if getattr(module, "layer_idx", None) is None or not any(
            "proj" in n or "query" in n for n, _ in module.named_children()
        ):
            continue
        layer = seen.setdefault(module.layer_idx, {})
        for name, child in module.named_children():

            def hook(child: Any, args: Any, output: Any, layer: Any = layer, name: str = name) -> None:
                layer[name] = output
                layer[f"{name} in"] = args[0]

            handles.append(child.register_forward_hook(hook))
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def before_rope(family: str, model: Any, seen: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`[HG,n,D]` and `[H,n,D]`: queries and keys before RoPE, from the outputs of the layer's submodules."""
    if family == "phi3":
        rows = seen["qkv_proj"][0].unflatten(-1, (-1, 16)).transpose(0, 1)
        return rows[:4], rows[4:6]
    if family == "gpt_neox":
        rows = seen["query_key_value"][0].unflatten(-1, (4, 3, 16)).transpose(0, 1)
        return rows[:, :, 0], rows[:, :, 1]
    if family in ("qwen3", "cohere"):  # norms over [1,n,heads,D] and [1,n,heads,D]
        rows = [seen[name][0] for name in ("q_norm", "k_norm")]
        return tuple(x.transpose(0, 1) if x.shape[1] in (2, 4) else x for x in rows)  # type: ignore[return-value]
    if family == "gemma3":  # norms over [1,heads,n,D]
        return seen["q_norm"][0], seen["k_norm"][0]
    return tuple(  # type: ignore[return-value]
        seen[name][0].unflatten(-1, (heads, -1)).transpose(0, 1) for name, heads in (("q_proj", 4), ("k_proj", 2))
    )


def attention(layer: TraceLayer) -> torch.Tensor:
    """`[T,H*G*D]` dense attention recomputed from what a trace holds."""
    rows = torch.arange(layer.keys.shape[1])
    mask = rows <= rows[:, None]
    if layer.window is not None:
        mask &= rows > rows[:, None] - layer.window
    logits = layer.query.float() @ layer.keys.float()[:, None].mT * layer.scale  # [H,G,T,T]
    out = logits.masked_fill(~mask, -torch.inf).softmax(-1) @ layer.values.float()[:, None]
    return out.flatten(0, 1).transpose(0, 1).flatten(1)


def close(a: torch.Tensor, b: torch.Tensor, bound: float) -> None:
    assert a.shape == b.shape
    assert (a.float() - b.float()).norm() <= bound * b.float().norm()


@pytest.mark.parametrize("chunk", [T, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_holds_what_attention_saw(family: str, chunk: int, tmp_path: Path) -> None:
    model, ids = tiny(family), text()
    trace = capture(model, ids, tmp_path / "t", chunk=chunk)
    assert (trace.tokens, trace.layers) == (T, (0, 1, 2))
    assert trace.meta["rope_absent"] == {}
    assert trace.meta["attention_differs"] == {}
    seen = observed(model, ids)
    for index in trace.layers:
        layer = trace.layer(index)
        query, keys = before_rope(family, model, seen[index])
        assert layer.rope is not None
        assert layer.rope.interleaved == (family in ("cohere", "glm4"))
        # Pre-RoPE vectors, and so the roped ones by an independent way, to the rounding of float32.
        close(layer.rope.unrotate(layer.keys, trace.positions), keys, 2e-6)
        close(layer.rope.unrotate(layer.query, trace.positions).flatten(0, 1), query, 2e-6)
        close(layer.keys, layer.rope.rotate(keys, trace.positions), 2e-6)
        output = next(seen[index][f"{name} in"] for name in ("o_proj", "dense") if f"{name} in" in seen[index])
        close(attention(layer), output[0], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_ahead_are_the_layers_own_of_the_input_of_the_layer_before(family: str, tmp_path: Path) -> None:
    """Beside a pass in which each attention layer is given that input by a hook, and what else it was given."""
    model, ids = tiny(family), text()
    plain = capture(model, ids, tmp_path / "plain")
    trace = capture(model, ids, tmp_path / "t", layers=[0, 2], queries=50, ahead=True, chunk=16)
    assert [trace.shapes[i].ahead for i in (0, 2)] == [False, True]
    assert trace.layer(0).ahead is None
    modules = [m for m in model.modules() if getattr(m, "layer_idx", None) == 1 and hasattr(m, "is_causal")]
    modules += [m for m in model.modules() if getattr(m, "layer_idx", None) == 2 and hasattr(m, "is_causal")]
    inputs: list[torch.Tensor] = []

    def swapped(module: Any, args: Any, options: dict[str, Any]) -> Any:
        inputs.append(options["hidden_states"] if "hidden_states" in options else args[0])
        if module is not modules[1]:
            return None
        if args:
            return (inputs[-2], *args[1:]), options
        return args, options | {"hidden_states": inputs[-2]}

    handles = [module.register_forward_pre_hook(swapped, with_kwargs=True) for module in modules]
    other = capture(model, ids, tmp_path / "other", chunk=T).layer(2)
    for handle in handles:
        handle.remove()
    layer = trace.layer(2)
    assert layer.ahead is not None
    torch.testing.assert_close(layer.ahead, other.query[:, :, -50:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(layer.ahead, plain.layer(2).query[:, :, -50:], rtol=0.1)
    for index in (0, 2):  # the pass itself is as without
        a, b = trace.layer(index), plain.layer(index)
        assert (a.rope is None, trace.meta["rope_absent"]) == (False, {})
        torch.testing.assert_close(a.query, b.query[:, :, -50:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)
    trace.save(tmp_path / "again")
    again = Trace.open(tmp_path / "again")
    again.verify()
    assert torch.equal(again.first(60).layer(2).ahead, layer.ahead[:, :, :40])


def test_what_is_recorded_beside_the_rows(tmp_path: Path) -> None:
    sliding = capture(tiny("gemma3"), text(), tmp_path / "g")
    assert [sliding.layer(i).window for i in range(3)] == [16, None, 16]
    assert sliding.layer(0).scale == 40**-0.5
    ropes = [sliding.layer(i).rope for i in range(3)]
    assert all(rope is not None for rope in ropes)
    assert torch.equal(ropes[0].inv_freq, ropes[2].inv_freq)  # type: ignore[union-attr]
    assert not torch.equal(ropes[0].inv_freq, ropes[1].inv_freq)  # type: ignore[union-attr]
    yarn = capture(tiny("yarn"), text(), tmp_path / "y").layer(0).rope
    assert yarn is not None
    assert yarn.scaling > 1.1
    partial = capture(tiny("phi3"), text(), tmp_path / "p").layer(0).rope
    assert partial is not None
    assert partial.rotated == 8
    model = tiny("llama")
    trace = capture(model, text(), tmp_path / "l", layers=[1], model_id="m", text={"name": "n"})
    assert trace.layers == (1,)
    assert (trace.meta["model"], trace.meta["text"], trace.meta["dtype"]) == ("m", {"name": "n"}, "float32")
    again = capture(tiny("llama"), text(), tmp_path / "m").meta
    assert again["config_hash"] == trace.meta["config_hash"]
    other = capture(tiny("llama", rms_norm_eps=1e-3), text(), tmp_path / "o").meta
    assert other["config_hash"] != trace.meta["config_hash"]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_pre_rope_to_the_rounding_of_the_stored_dtype(dtype: torch.dtype, bound: float, tmp_path: Path) -> None:
    model, ids = tiny("qwen3"), text()
    trace = capture(model, ids, tmp_path / "t", dtype=dtype)
    seen = observed(model, ids)
    for index in trace.layers:
        layer = trace.layer(index)
        assert layer.keys.dtype == dtype
        assert layer.rope is not None
        query, keys = before_rope("qwen3", model, seen[index])
        # One rounding when stored and one when turned back, each of at most half a unit in the last place.
        for stored, exact in ((layer.keys, keys), (layer.query.flatten(0, 1), query)):
            back = layer.rope.unrotate(stored, trace.positions).float()
            half = back.shape[-1] // 2
            pair = torch.hypot(exact[..., :half], exact[..., half:]).repeat(1, 1, 2)
            assert ((back - exact).abs() <= 2.5 * bound * pair + 1e-6).all()


def test_a_model_in_bfloat16(tmp_path: Path) -> None:
    model, ids = tiny("llama").to(torch.bfloat16), text()
    trace = capture(model, ids, tmp_path / "t", chunk=32)
    assert trace.meta["rope_absent"] == {}
    assert trace.meta["attention_differs"] == {}
    layer = trace.layer(0)
    assert layer.keys.dtype == torch.bfloat16
    assert layer.rope is not None
    # The model rounds cos, sin, both products and their sum.
    close(
        layer.rope.unrotate(layer.keys, trace.positions), before_rope("llama", model, observed(model, ids)[0])[1], 0.02
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_chunks_make_no_difference(family: str, implementation: str, tmp_path: Path) -> None:
    model, ids = tiny(family), text()
    model.set_attn_implementation(implementation)
    whole = capture(model, ids, tmp_path / "whole", chunk=1000)
    for chunk in (1, 7, 64):
        parts = capture(model, ids, tmp_path / "parts", chunk=chunk, layers=[0, 2])
        assert parts.meta["attention"] == implementation
        # A first chunk of the token at position 0 cannot tell how a layer rotates, and the trace says so.
        assert len(parts.meta["rope_absent"]) == (2 if chunk == 1 else 0)
        for index in (0, 2):
            a, b = parts.layer(index), whole.layer(index)
            for x, y in ((a.query, b.query), (a.keys, b.keys), (a.values, b.values)):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == implementation


def test_the_first_tokens_are_what_a_capture_that_ended_there_holds(tmp_path: Path) -> None:
    model, ids = tiny("gemma3"), text()
    cut = capture(model, ids, tmp_path / "whole").first(40)
    short = capture(model, ids[:, :40], tmp_path / "short")
    assert (cut.tokens, cut.layers) == (short.tokens, short.layers)
    for index in cut.layers:
        a, b = cut.layer(index), short.layer(index)
        for x, y in ((a.query, b.query), (a.keys, b.keys), (a.values, b.values)):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model, ids = tiny("llama").train(), text()
    model.model.layers[1].eval()  # as where a part is frozen
    modes = [module.training for module in model.modules()]
    model.set_attn_implementation("eager")
    before = model(ids).logits

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for progress in (None, stop):
        try:
            capture(model, ids, tmp_path / "t", progress=progress)
        except KeyboardInterrupt:
            assert progress is stop
        assert model.config._attn_implementation == "eager"
        assert [module.training for module in model.modules()] == modes
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert torch.equal(model(ids).logits, before)
    (tmp_path / "t").unlink()
    with pytest.raises(KeyboardInterrupt):
        capture(model, ids, tmp_path / "t", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_implementation_of_any_name_sees_its_own_name(tmp_path: Path) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    names: set[str] = set()

    def flash(module: Any, *args: Any, **kwargs: Any) -> Any:  # flash attention asks the config which one it is
        names.add(module.config._attn_implementation)
        return sdpa_attention_forward(module, *args, **kwargs)

    transformers.AttentionInterface.register("test/flash-attention", flash)
    transformers.AttentionMaskInterface.register("test/flash-attention", sdpa_mask)
    model = tiny("mistral")
    whole = capture(model, text(), tmp_path / "sdpa").layer(2)
    for module in (model, model.model):
        module.config._attn_implementation = "test/flash-attention"
    trace = capture(model, text(), tmp_path / "flash", chunk=32)
    assert (names, trace.meta["attention"]) == ({"test/flash-attention"}, "test/flash-attention")
    assert model.config._attn_implementation == "test/flash-attention"
    torch.testing.assert_close(trace.layer(2).query, whole.query, rtol=1e-4, atol=1e-4)


def test_progress_and_layers_that_need_not_run(tmp_path: Path) -> None:
    model, seen, ran = tiny("llama"), [], []
    handle = model.model.layers[2].register_forward_hook(lambda *args: ran.append(1))
    capture(model, text(), tmp_path / "t", chunk=32, layers=[0], progress=lambda *args: seen.append(args))
    handle.remove()
    assert seen == [(32, T), (64, T), (70, T)]
    assert len(ran) == 1  # the look at two tokens that tells the layers' shapes


def test_frequencies_that_change_with_the_length(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48, **factors}
    rope["partial_rotary_factor"] = 1.0
    model = tiny(
        "phi3",
        rope_parameters=rope,
        partial_rotary_factor=1.0,  # older releases of transformers let this one win
        max_position_embeddings=192,
        original_max_position_embeddings=48,
        sliding_window=None,
    )
    trace = capture(model, text(), tmp_path / "t", chunk=16)
    assert trace.layer(0).rope is None
    assert "frequencies change with the length" in trace.meta["rope_absent"]["0"]
    assert trace.meta["attention_differs"] == {}
    for tokens in (40, T):  # one set of frequencies from first to last
        trace = capture(model, text(tokens), tmp_path / "u", chunk=100)
        assert trace.layer(0).rope is not None


def test_layers_without_rope_and_models_without_any(tmp_path: Path) -> None:
    config = transformers.SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1])
    torch.manual_seed(0)
    trace = capture(transformers.SmolLM3ForCausalLM(config).eval(), text(), tmp_path / "t")
    assert [trace.layer(i).rope is None for i in range(3)] == [False, True, False]
    assert "applies no RoPE" in trace.meta["rope_absent"]["1"]
    small = transformers.GPT2Config(
        vocab_size=256, n_embd=64, n_layer=1, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    )
    trace = capture(transformers.GPT2LMHeadModel(small).eval(), text(), tmp_path / "t", chunk=32)
    assert "given no rotary embedding" in trace.meta["rope_absent"]["0"]


def test_what_a_trace_cannot_hold_is_said(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(**COMMON, head_dim=16, attn_logit_softcapping=50.0)
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).eval().to(torch.bfloat16)
    trace = capture(model, text(), tmp_path / "t", chunk=32)
    assert trace.meta["attention_differs"] == {
        str(i): "the layer soft-caps its logits (softcap), which a trace does not hold" for i in range(3)
    }
    sinks = transformers.GptOssConfig(**COMMON | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1})
    model = transformers.GptOssForCausalLM(sinks).eval().to(torch.bfloat16)
    trace = capture(model, text(), tmp_path / "t", layers=[1])
    assert trace.meta["attention_differs"] == {
        "1": "the layer adds a learned sink to its softmax (s_aux), which a trace does not hold"
    }


def test_a_difference_that_nothing_announces_is_measured(tmp_path: Path) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def blind(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(module, query, *args, **kwargs)
        out[:, -5:-4] *= 1.1  # one of the last tokens, not the last
        return out, weights

    transformers.AttentionInterface.register("blind", blind)
    transformers.AttentionMaskInterface.register("blind", sdpa_mask)
    model = tiny("mistral")
    for module in (model, model.model):
        module.config._attn_implementation = "blind"
    trace = capture(model, text(), tmp_path / "t", chunk=32)
    assert "attention recomputed from the trace is off by" in trace.meta["attention_differs"]["2"]


def test_what_the_stored_dtype_cannot_hold_and_nan_are_said(tmp_path: Path) -> None:
    model = tiny("llama")
    torch.nn.init.constant_(model.model.layers[1].self_attn.v_proj.weight, 1e5)
    with pytest.raises(TraceError, match=r"in layer 1's values at token \d+ is beyond float16, .*--dtype"):
        capture(model, text(), tmp_path / "t", dtype=torch.float16)
    assert capture(model, text(), tmp_path / "t", dtype=torch.bfloat16).layer(1).values.isfinite().all()
    (tmp_path / "t").unlink()
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)  # behind the last layer
    capture(model, text(), tmp_path / "t")
    (tmp_path / "t").unlink()
    torch.nn.init.constant_(model.model.layers[0].self_attn.k_proj.weight, torch.nan)
    with pytest.raises(TraceError, match="the model produced NaN in layer 0's keys at token 0"):
        capture(model, text(), tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_model_takes_one_capture_at_a_time(tmp_path: Path) -> None:
    model, refused = tiny("llama"), []

    def second() -> None:
        try:
            capture(model, text(8), tmp_path / "u")
        except ModelError as error:
            refused.append(str(error))

    def during(done: int, total: int) -> None:
        threads = [threading.Thread(target=second) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    trace = capture(model, text(), tmp_path / "t", progress=during)
    assert refused == ["this model is being captured already"] * 3
    again = capture(model, text(), tmp_path / "u")
    assert again.meta["attention"] == trace.meta["attention"] == "sdpa"
    assert torch.equal(again.layer(2).keys, trace.layer(2).keys)


def test_a_full_gpu_asks_for_a_smaller_chunk(tmp_path: Path) -> None:
    model = tiny("llama")

    def full(module: Any, args: Any, output: Any) -> None:
        if output.shape[1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.model.layers[1].mlp.register_forward_hook(full)
    with pytest.raises(ModelError, match="cpu is out of memory at token 0 of 70, try a smaller chunk than 32"):
        capture(model, text(), tmp_path / "t", chunk=32)
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path) -> None:
    model, path = tiny("llama"), tmp_path / "t"
    for index in (7, -1):
        with pytest.raises(ModelError, match=f"LlamaForCausalLM has no layer {index}, it has layers 0 to 2"):
            capture(model, text(), path, layers=[0, index])
    hybrid = transformers.Lfm2Config(**COMMON, layer_types=["conv", "full_attention", "conv"])
    with pytest.raises(
        ModelError, match=r"layer 2 of Lfm2ForCausalLM has no softmax attention to record, layers 1 have"
    ):
        capture(transformers.Lfm2ForCausalLM(hybrid).eval(), text(), path, layers=[1, 2])
    for layers in ([], [1, 1]):
        with pytest.raises(ModelError, match="layers are one or more different indices, got "):
            capture(model, text(), path, layers=layers)
    for bad in (256, -1):
        with pytest.raises(ModelError, match=f"ids of LlamaForCausalLM are 0 to 255, the text has {bad}"):
            capture(model, torch.tensor([[1, 2, bad]]), path)
    with pytest.raises(ModelError, match=r"input_ids \[1,T\], got \[2, 3\]"):
        capture(model, torch.zeros(2, 3, dtype=torch.long), path)
    with pytest.raises(ModelError, match="at least 1 token, got 0"):
        capture(model, text(), path, chunk=0)
    with pytest.raises(TraceError, match="No such file"):
        capture(model, text(), tmp_path / "gone" / "t")
    mamba = transformers.MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelError, match="AttentionInterface"):
        capture(transformers.MambaForCausalLM(mamba).eval(), text(8), path)
    bloom = transformers.BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ModelError, match="attention code of its own"):
        capture(transformers.BloomForCausalLM(bloom).eval(), text(8), path)
    t5 = transformers.T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="is an encoder-decoder"):
        capture(transformers.T5ForConditionalGeneration(t5).eval(), text(8), path)
    bert = transformers.BertGenerationConfig(**COMMON)
    with pytest.raises(ModelError, match="layer 0 of BertGenerationDecoder attends to later tokens too"):
        capture(transformers.BertGenerationDecoder(bert).eval(), text(8), path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_known_before_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    done: list[int] = []
    with pytest.raises(TraceError, match="has 5 free"):
        capture(tiny("llama"), text(), tmp_path / "t", chunk=8, progress=lambda *args: done.append(1))
    assert (done, list(tmp_path.iterdir())) == ([], [])


def test_load_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path / "bytes")
    capfd.readouterr()
    model, tokenizer = load_model(tmp_path / "bytes")
    assert (model.dtype, model.training, tokenizer) == (torch.bfloat16, False, None)
    assert load_model(str(tmp_path / "bytes"), dtype=torch.float32)[0].dtype == torch.float32
    assert capfd.readouterr() == ("", "")  # no bar
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert encode(None, b"\x00\xffa").tolist() == [[0, 255, 97]]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(ModelError, match=r"^device cuda: torch sees no CUDA device here$"):
        load_model(tmp_path / "bytes", device="cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(ModelError, match=r"^device cuda:1: torch sees no such CUDA device here$"):
        load_model(tmp_path / "bytes", device="cuda:1")
    with pytest.raises(ModelError, match=r"^device foo is not a torch device, such as cpu or cuda$"):
        load_model(tmp_path / "bytes", device="foo")
    tiny("llama", vocab_size=300).save_pretrained(tmp_path / "words")
    with pytest.raises(ModelError, match=r"has 300 tokens and no tokenizer files; a model of bytes has 256"):
        load_model(tmp_path / "words")
    with pytest.raises(ModelError, match=r"no such model folder: .*gone"):
        load_model(tmp_path / "gone")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is a file, not a model folder"):
        load_model(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"without config\.json"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(tmp_path / "empty")
    transformers.ViTConfig().save_pretrained(tmp_path / "vision")
    with pytest.raises(ModelError, match=r"is a vit model, which is no causal LM"):
        load_model(tmp_path / "vision")
    weights = tmp_path / "bytes" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, such as model\.norm\.weight"):
        load_model(tmp_path / "bytes")
    weights.write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"the weights of .* cannot be loaded"):
        load_model(tmp_path / "bytes")
    with pytest.raises(ModelError, match="the text is empty"):
        encode(None, b"")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    tiny("llama").save_pretrained(folder)
    return folder


def changed(good: Path, folder: Path, **fields: Any) -> Path:
    """A copy of a model folder with fields of its config.json changed."""
    shutil.copytree(good, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_hidden_layers": "two"}, r"^the config.json of \S+ cannot be read: .*'num_hidden_layers' expected int"),
        ({"vocab_size": None}, r"^the config.json of \S+ cannot be read: .*'vocab_size' expected int"),
        ({"num_attention_heads": 0}, r"^the config.json of \S+ cannot be read: ZeroDivisionError"),
        ({"quantization_config": 3}, r"^the config.json of \S+ cannot be read: AttributeError"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": [1]}},
            r"^the weights of \S+ cannot be loaded into the model that its config.json describes: TypeError: .*'list'",
        ),
    ],
)
def test_a_config_with_a_field_of_the_wrong_type(
    fields: dict[str, Any], sentence: str, saved_model: Path, tmp_path: Path
) -> None:
    folder = changed(saved_model, tmp_path / "model", **fields)
    with pytest.raises(ModelError, match=sentence) as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)
    (tmp_path / "text").write_text("hello")
    done = run("capture", "--model", folder, "--text", tmp_path / "text")
    assert done.exit_code == 2
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)


@pytest.mark.parametrize("content", ["7", "null", '"x"', "[]"])
def test_a_config_that_is_no_object(content: str, saved_model: Path, tmp_path: Path) -> None:
    folder = changed(saved_model, tmp_path / "model")
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"^the config.json of \S+ cannot be read: [^\n]+$"):
        load_model(folder)


@pytest.mark.parametrize("content", ["[]", "null", '{"model": 3}', "{"])
def test_a_tokenizer_file_that_is_none(content: str, saved_model: Path, tmp_path: Path) -> None:
    folder = changed(saved_model, tmp_path / "model")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"^the tokenizer of \S+ cannot be loaded: [^\n]+$"):
        load_model(folder)


def test_weights_of_other_shapes_are_one_sentence_and_no_table(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does transformers log one beside it; what it logs of a model that it can load is kept."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    folder = changed(saved_model, tmp_path / "wide", intermediate_size=100)
    with pytest.raises(ModelError) as raised:
        load_model(folder)
    assert re.fullmatch(
        r"the weights of \S+wide are not those of its config.json: 9 tensors have another shape, such as "
        r"model.layers.0.mlp.down_proj.weight, which is \[64, 96\] and would be \[64, 100\]",
        str(raised.value),
    )
    assert logged == []
    load_model(changed(saved_model, tmp_path / "short", num_hidden_layers=2))
    assert len(logged) == 1
    assert "UNEXPECTED" in logged[0]
    assert logging.getLogger("transformers").handlers == [handler]


def test_code_that_comes_with_a_model_is_not_run(saved_model: Path, tmp_path: Path) -> None:
    files = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    folder = changed(saved_model, tmp_path / "model", model_type="own", auto_map=files)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match=r"model brings Python code of its own, which is not run here"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_nothing_is_loaded_with_code_of_its_own(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: set[tuple[str, Any]] = set()
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    for kind in kinds:
        real = getattr(transformers, kind).from_pretrained

        def noted(*args: Any, kind: str = kind, real: Any = real, **options: Any) -> Any:
            given.add((kind, options.get("trust_remote_code")))
            return real(*args, **options)

        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", noted)
    monkeypatch.setattr(models, "TOKENIZER_FILES", ("config.json",))  # the byte model, as one with a tokenizer
    with pytest.raises(ModelError, match="the tokenizer of"):
        load_model(saved_model)
    assert given == {(kind, False) for kind in kinds}


def test_ctrl_c_while_weights_load_is_an_interruption(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's stack of modes trips over it: what arrives is a RuntimeError."""

    def interrupted(*args: Any, **options: Any) -> None:
        with torch.device("meta"):
            torch.overrides._pop_mode()  # a mode has taken itself from the stack for a moment, and then comes Ctrl-C
            raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="empty"):
        interrupted()
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model(saved_model)
    (tmp_path / "text").write_text("hello")
    done = run("capture", "--model", saved_model, "--text", tmp_path / "text")
    assert (done.exit_code, done.output.strip()) == (130, "sparseattn: interrupted")


def test_queries_ahead_are_asked_for_on_the_command_line(saved_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    command = ["capture", "--model", str(saved_model), "--text", str(tmp_path / "text"), "--ahead"]
    done = run(*command, "--out", tmp_path / "t.safetensors")
    assert done.exit_code == 0, done.output
    shapes = Trace.open(tmp_path / "t.safetensors").shapes
    assert {index: shape.ahead for index, shape in shapes.items()} == {i: i > 0 for i in shapes}


def test_the_reference_model_goes_by_its_name(
    saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every command and function that takes a model; a folder of that name is reached as one."""
    model, tokenizer = load_model("reference", device="cpu")
    assert (model.dtype, model.config.num_hidden_layers, tokenizer) == (torch.float32, 4, None)
    assert load_model("reference", dtype=torch.float16, device="cpu")[0].dtype == torch.float16
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved_model, tmp_path / "reference")
    for folder in ("./reference", Path("reference")):
        assert load_model(folder, device="cpu")[0].config.num_hidden_layers == 3
    (tmp_path / "text").write_text("hello, hello")
    command = ["capture", "--text", "text", "--device", "cpu", "--model"]
    for name, layers in (("reference", "0, 1, 2, 3"), ("./reference", "0, 1, 2")):
        done = run(*command, name)
        assert done.exit_code == 0, done.output
        assert f"12 tokens, layers {layers}," in done.stdout
    assert Trace.open("trace.safetensors").meta["model"] == "./reference"


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nCheckout our documentation.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    sentence = "^no/one is neither a local folder nor a model that the hub returns: We couldn't connect to the hub$"
    with pytest.raises(ModelError, match=sentence):
        load_model("no/one")


def test_text_for_a_tokenizer_is_utf8() -> None:
    with pytest.raises(ModelError, match=r"not UTF-8 \(byte 1 is 0xff\)"):
        encode(lambda text: {"input_ids": [1]}, b"a\xff")
    assert encode(lambda text: {"input_ids": [len(text)]}, "é".encode()).tolist() == [[1]]


@pytest.fixture
def injected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Built-in traces in a folder of their own, from a tiny random model and of 512 tokens."""
    model = tmp_path / "model"
    tiny("llama").save_pretrained(model)
    monkeypatch.setattr(models, "reference_folder", lambda: model)
    monkeypatch.setattr(builtin_traces, "TOKENS", 512)
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    return model


@pytest.mark.parametrize("name", builtin_traces.BYTES)
def test_builtin_traces_are_made_once(name: str, injected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = builtin_traces.builtin_trace(name)
    assert (made.name, made.tokens, made.layers) == (name, 512, (0, 1, 2))
    assert made.layer(0).rope is not None
    monkeypatch.setattr(recording, "capture", lambda *args, **kwargs: pytest.fail("made twice"))
    assert torch.equal(builtin_traces.builtin_trace(name).layer(1).keys, made.layer(1).keys)
    monkeypatch.undo()


def test_builtin_traces_follow_the_weights(injected: Path) -> None:
    first = builtin_traces.builtin_trace("recall")
    tiny("llama", initializer_range=0.2).save_pretrained(injected)
    assert not torch.equal(builtin_traces.builtin_trace("recall").layer(0).keys, first.layer(0).keys)
    assert len(list(builtin_traces.cache_folder().iterdir())) == 2
    config = transformers.AutoConfig.from_pretrained(injected)
    config.rms_norm_eps = 1e-3
    config.save_pretrained(injected)
    builtin_traces.builtin_trace("recall")
    assert len(list(builtin_traces.cache_folder().iterdir())) == 3
    (injected / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="the reference model's weights are missing"):
        builtin_traces.builtin_trace("text")
    with pytest.raises(TraceError, match=r"no built-in trace 'x', there are prose, .* recall and text"):
        builtin_traces.builtin_trace("x")


def test_a_damaged_builtin_trace_is_made_again(injected: Path) -> None:
    whole = builtin_traces.builtin_trace("recall").layer(0).keys.clone()
    (path,) = builtin_traces.cache_folder().iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert torch.equal(builtin_traces.builtin_trace("recall").layer(0).keys, whole)
    assert list(builtin_traces.cache_folder().iterdir()) == [path]


def test_a_cache_folder_that_cannot_be_written(injected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(injected)._replace(free=5)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(
            TraceError, match=r"trace recall has no place .*has 5 free.*SPARSEATTN_CACHE names the folder"
        ):
            builtin_traces.builtin_trace("recall")
    monkeypatch.setenv("SPARSEATTN_CACHE", str(injected / "config.json" / "x"))
    with pytest.raises(
        TraceError, match=r"trace recall has no place .*Not a directory.*SPARSEATTN_CACHE names the folder"
    ):
        builtin_traces.builtin_trace("recall")


def test_builtin_texts_are_the_same_everywhere() -> None:
    recall, prose = builtin_traces.recall_bytes(), builtin_traces.text_bytes()
    assert len(recall) == len(prose) == 8192
    assert hashlib.sha256(recall).hexdigest()[:16] == "d467af92f7b83f1a"
    assert hashlib.sha256(prose).hexdigest()[:16] == "a0d31f1391a91be2"
    # Retrieval goes on to the end: most 16-byte strings of the last 1,024 bytes occur before, and often far before.
    far = [recall.find(recall[i : i + 12]) for i in range(7168, 8180)]
    assert sum(place < i - 1024 for i, place in enumerate(far, 7168)) > 300


def test_the_queries_of_the_last_tokens_alone(tmp_path: Path) -> None:
    """Whatever the chunks: the rows are those of a whole trace, and keys and values are all there."""
    model = tiny("llama3")
    whole = capture(model, text(), tmp_path / "whole", chunk=16)
    for queries in (1, 20, 32, T, 1000):
        trace = capture(model, text(), tmp_path / "part", chunk=16, queries=queries)
        kept = min(queries, T)
        for index in trace.layers:
            ours, theirs = trace.layer(index), whole.layer(index)
            assert torch.equal(ours.query, theirs.query[:, :, -kept:])
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
            assert ours.rope is not None
    with pytest.raises(ModelError, match="the queries of at least 1 token, got 0"):
        capture(model, text(), tmp_path / "none", queries=0)
    assert not (tmp_path / "none").exists()


def test_a_trace_that_is_there_is_kept_if_it_is_the_same(tmp_path: Path) -> None:
    model, path = tiny("llama"), tmp_path / "t"
    capture(model, text(), path, layers=[1])
    before = path.stat()
    assert capture(model, text(), path, layers=[1], keep=True).layers == (1,)
    assert path.stat() == before  # it was not written again
    other, tuned = tiny("llama", rms_norm_eps=1e-3), tiny("llama")
    with torch.no_grad():
        next(tuned.parameters()).add_(1)
    for arguments, sentence in (
        ((other, text(), path), "of another model"),
        ((tuned, text(), path), "of another model"),
        ((model, text(T - 1), path), "of another text"),
    ):
        with pytest.raises(TraceError, match=sentence):
            capture(*arguments, layers=[1], keep=True)
    for options in ({"layers": [0]}, {"layers": [1], "queries": 8}, {"layers": [1], "dtype": torch.float16}):
        with pytest.raises(TraceError, match=r"of other layers, queries or dtype \(layers 1, torch.float32\)"):
            capture(model, text(), path, keep=True, **options)
    assert path.stat() == before
    assert list(tmp_path.iterdir()) == [path]


def test_several_texts_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and a file: one model load, a trace of each text's name; the same command goes on where it stopped."""
    tiny("llama").save_pretrained(tmp_path / "model")
    books = tmp_path / "books"
    books.mkdir()
    for number, name in enumerate(("books/b.txt", "books/a.txt", "c.txt")):
        (tmp_path / name).write_bytes(bytes(text(40 + number)[0].tolist()))
    out, loads = tmp_path / "new" / "traces", []
    load = models.load_model
    monkeypatch.setattr(inputs, "load_model", lambda *args, **kwargs: loads.append(1) or load(*args, **kwargs))

    def captured(*options: str | Path) -> Any:
        texts = ("--text", books, "--text", tmp_path / "c.txt")
        arguments = ("capture", "--model", tmp_path / "model", *texts, "--device", "cpu", *options)
        return run(*arguments)

    done = captured("--out", out, "--layers", "1", "--tokens", "41")
    assert done.exit_code == 0, done.output
    assert len(loads) == 1
    assert [line.partition(":")[0].rpartition("/")[2] for line in done.stdout.splitlines()] == [
        "a.safetensors",
        "b.safetensors",
        "c.safetensors",
    ]
    tokens = {path.stem: Trace.open(path).tokens for path in out.iterdir()}
    assert tokens == {"a": 41, "b": 40, "c": 41}
    assert Trace.open(out / "b.safetensors").meta["text"] == {
        "name": "b.txt",
        "sha256": hashlib.sha256((books / "b.txt").read_bytes()).hexdigest(),
    }
    (out / "b.safetensors").unlink()
    before = (out / "a.safetensors").stat()
    assert captured("--out", out, "--layers", "1", "--tokens", "41").exit_code == 0
    assert (out / "b.safetensors").exists()
    assert (out / "a.safetensors").stat() == before
    done = captured("--out", out, "--layers", "0", "--tokens", "41")
    assert done.exit_code == 2
    assert "a.safetensors is a trace of other layers" in " ".join(done.output.split())


def test_several_texts_are_refused_before_a_model_runs(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    for folder in ("one", "two", "none"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "x.txt").write_text("hello")
    (tmp_path / "two" / "x.md").write_text("other")
    (tmp_path / "void.txt").write_text("")
    out = tmp_path / "traces"
    for texts, target, sentence in (
        (["one", "void.txt"], out, "void.txt: the text is empty"),
        (["one", "two"], out, "would both be"),
        (["none"], out, "contains no text file"),
        (["one"], tmp_path / "t.safetensors", "several texts need a folder as --out"),
        (["one"], tmp_path / "void.txt", "--out must be a folder"),
        (["one", "gone.txt"], out, "gone.txt"),
    ):
        arguments = ["capture", "--model", str(tmp_path / "model"), "--out", str(target), "--device", "cpu"]
        for name in texts:
            arguments += ["--text", str(tmp_path / name)]
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert sentence in " ".join(done.output.split())
        assert not list(tmp_path.rglob("x.safetensors"))
