"""A model's own index beside other methods, at equal rows and at equal bytes; and which layers could share one.

``python -m benchmarks.native_audit`` from the repository root writes ``benchmarks/results/native-audit.json``.

**Models are tiny and random, so nothing here says how good an index is.** It shows that every figure of an audit can
be had. A trace of random tokens is captured, and its last tokens are replayed. `hata` and `indexer` are trained on a
trace of other tokens. KL is that of predictions from attention to all rows, the same tokens decoded by the model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks import records
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.by_head import Comparison, at_bytes, at_rows
from sparseattn.evaluation.native_overlap import native_overlap
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.evaluation.tasks.compared import FORCED
from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.run import Method, measure
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.models.capture import capture
from sparseattn.models.sparse_cache import restore
from sparseattn.selectors.base import Selector
from sparseattn.selectors.baselines.native import NATIVE, Native
from sparseattn.selectors.registry import make_selector
from sparseattn.training import train_index
from sparseattn.training.index_run import IndexRecipe

LAYERS, HEADS, KV_HEADS, SIZE = 3, 4, 2, 32
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "initializer_range": 0.3,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
ROWS = 32  # that an index chooses
TRAINED = ("hata", "indexer")
# Family -> its config, its model, and what is its own.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minimax_m3_vl": (
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        {
            "intermediate_size": 32,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "num_local_experts": 2,
            "rotary_dim": SIZE // 2,
            "index_n_heads": KV_HEADS,
            "index_head_dim": SIZE // 2,
            "index_block_size": 8,
            "index_topk_blocks": ROWS // 8,
            "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * (LAYERS - 1),
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            "shared_expert_intermediate_size": 32,
            "num_experts": 2,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": SIZE // 2,
            "indexer_budget": ROWS,
            "indexer_compress_ratio": 4,
            "layer_types": ["full_attention"] * LAYERS,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {
            "num_key_value_heads": HEADS,
            "intermediate_size": 64,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": SIZE,
            "head_dim": 16,
            "index_topk": ROWS,
            "index_head_dim": SIZE // 2,
            "index_n_heads": 4,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
}
UNTRAINED = ("exact", "lowbit:bits=1,rows=16", "quest:page=8", "querypq")
BUDGETS = (8, 16, ROWS, 64, 128)


def random_model(family: str, tokens: int) -> Any:
    """A model of a few layers with random weights."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    config, kind, own = MODELS[family]
    torch.manual_seed(0)
    sizes = {**COMMON, **own, "max_position_embeddings": 2 * tokens}
    model = getattr(module, kind)(getattr(module, config)(**sizes)).eval()
    model.set_attn_implementation("sdpa")
    return model


def random_tokens(tokens: int, seed: int) -> torch.Tensor:
    """`[1,T]` of nothing but chance."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, COMMON["vocab_size"], (1, tokens), generator=draw)


def audited(family: str, tokens: int, last: int, steps: int, folder: Path) -> dict[str, Any]:
    """Every figure of a family's audit. Args: steps: of training a layer's index."""
    model, ids = random_model(family, tokens), random_tokens(tokens, 1)
    capture(model, random_tokens(tokens, 2), folder / "train.safetensors")
    trace = capture(model, ids, folder / "audit.safetensors", chunk=tokens)
    layers, shares = native_overlap(trace)
    methods = [Native(), *map(make_selector, UNTRAINED), *trained(folder, steps)]
    results = [
        one for method in methods for one in evaluate_budgets(trace, method, budgets(method), replay(layers, last))
    ]
    own = next(one for one in results if one.label == NATIVE and one.budget == ROWS)
    kl = divergences(model, ids, methods, last, layers)
    equal = (at_rows(results, ROWS), at_bytes(results, own.mean("bytes_share")))
    return {
        "family": family,
        "layers": layers,
        "share": shares.tolist(),
        "index_bytes": own.mean("bytes_share") - own.mean("attended_share"),
        "methods": [one for comparison in equal for one in compared(comparison, kl)],
    }


def replay(layers: list[int], last: int) -> Replay:
    """How a trace is replayed: no rows besides those chosen but the newest, so that rows are equal."""
    return Replay(sink=0, window=1, last=last, layers=layers)


def budgets(method: Selector) -> list[int]:
    """The budgets that a method is measured at; an index chooses `ROWS` and no more."""
    return [rows for rows in BUDGETS if method.span <= rows and (rows <= ROWS or not isinstance(method, Native))]


def trained(folder: Path, steps: int) -> Iterator[Selector]:
    """Indexes that this project trains, on a trace of other tokens."""
    for name in TRAINED:
        path = folder / f"{name}.safetensors"
        train_index([folder / "train.safetensors"], path, IndexRecipe(name, steps=steps), device="cpu")
        yield make_selector(f"{name}:artefact={path}")


def divergences(
    model: Any, ids: torch.Tensor, methods: list[Selector], last: int, layers: list[int]
) -> dict[str, float]:
    """Label -> KL divergence of predictions from those of attention to all rows, in nats, mean over tokens."""
    decoder = ModelDecoder(model, sink=0, window=1)
    read, tail = ids[0, :-last].tolist(), ids[0, -last:].tolist()
    prompt = Prompt({"task": "agreement"}, read, tail, expected=tail)
    where = tuple(layers)
    asked = [Method()]
    for method in methods:
        budget = None if isinstance(method, Native) else ROWS
        asked.append(Method(method, budget, None if budget is None else str(budget), where))
    found = {one["method"]: one["kl"] for one in measure(prompt, asked, [FORCED], decoder, Tokens(None))}
    restore(model)
    return found


def compared(comparison: Comparison, kl: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """What each method does at equal rows or bytes; `kl` is known at equal rows."""
    for label, one in comparison.readings.items():
        made = {
            "equal": comparison.equal,
            "method": label.partition(":artefact")[0],
            "rows": one.mean("attended"),
            "bytes_share": one.mean("bytes_share"),
            "recall": one.mean("recall@10"),
            "mass": one.mean("mass"),
            "error": one.mean("relative_error"),
        }
        yield {**made, "kl": kl[label]} if comparison.equal == "rows" else made


def tables(record: Mapping[str, Any]) -> Iterable[Table]:
    """One row for each family, condition and method."""
    table = Table("family", "at equal", "method", "rows", "bytes", "recall@10", "mass", "error", "KL")
    for run in record["runs"]:
        for one in run["methods"]:
            shown = (f"{one[name]:.1%}" for name in ("bytes_share", "recall", "mass", "error"))
            kl = f"{one['kl']:.3f}" if "kl" in one else ""
            table.add_row(run["family"], one["equal"], one["method"], f"{one['rows']:.0f}", *shown, kl)
    yield table


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--family", action="append", choices=list(MODELS), help="may be given several times")
    command.add_argument("--tokens", type=int, default=512, help="of the trace")
    command.add_argument("--last", type=int, default=16, help="of them measured")
    command.add_argument("--steps", type=int, default=50, help="of training each layer of hata and indexer")
    records.add_options(command)
    options = command.parse_args()
    runs = []
    for family in options.family or list(MODELS):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(audited(family, options.tokens, options.last, options.steps, Path(folder)))
    facts = {"tokens": options.tokens, "last": options.last, "steps": options.steps, "chosen": ROWS}
    environment = {"machine": machine(), "versions": versions()}
    record = {"benchmark": "native-audit", **environment, "dtype": "float32", **facts, "runs": runs}
    records.end(record, "native-audit.json", tables, options)


if __name__ == "__main__":
    main()
