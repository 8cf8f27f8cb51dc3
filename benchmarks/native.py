"""A decode step of models that have an index of their own: its rows alone, against a mask over all of them.

``python -m benchmarks.native --rows 32768`` from the repository root writes ``benchmarks/results/native.json``.

One layer with random weights stands for a model: its attention and its index have the sizes of the published model but
for what `SHAPES` says, and what is no attention is small, so that a step is the layer. Its cache is filled with random
rows, as a prefill by a mask of all pairs would not fit. eager and sdpa are the model's own; native is
`SparseCache(native=True)`. Ways take turns, a step each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import records
from sparseattn.cli.values import integers
from sparseattn.cost_model.environment import machine, versions
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.native_layer import NativeLayer
from sparseattn.models.sparse_cache import SparseCache

SMALL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 1024, "num_hidden_layers": 1, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 64}
LATENT: dict[str, Any] = {
    **SMALL,
    **EXPERTS,
    "intermediate_size": 64,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense"],
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Family -> its config, its model, what is not the published size, and that in words.
SHAPES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "minimax_m3_vl": (
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        {
            **SMALL,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size": 64,
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 64,
            "layer_types": ["minimax_m3_sparse"],
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        "64 query heads, 4 KV heads of 128; best 16 of blocks of 128",
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        {
            **SMALL,
            **EXPERTS,
            "num_experts": 2,
            "shared_expert_intermediate_size": 64,
            "hc_count": 2,
            "hc_lowrank": 8,
            "layer_types": ["indexed_attention"],
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "max_position_embeddings": 1 << 18,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [16, 8, 8]},
        },
        "16 query heads, 2 KV heads of 256; best 512 of groups of 4",
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        LATENT,
        "16 of its 128 heads, latents of 512 + 64; best 2,048 rows",
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**LATENT, "indexer_types": ["full"]},
        "16 of its 64 heads, latents of 512 + 64; best 2,048 rows",
    ),
}


def random_layer(family: str) -> Any:
    """A model of one layer with random weights."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    config, kind, changes, _ = SHAPES[family]
    torch.manual_seed(0)
    return getattr(module, kind)(getattr(module, config)(**changes)).eval()


def random_rows(model: Any, rows: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Keys, values and keys of the index for so many tokens, and whether QSA keeps positions too."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(torch.ones(1, 4, dtype=torch.int64), use_cache=True, **cache_argument(cache))
    layer: Any = cache.layers[0]
    index = layer.idx_keys if hasattr(layer, "idx_keys") else layer.indexer_keys
    kept = [
        torch.randn(*held.shape[:-2], rows, held.shape[-1]) * held.std() for held in (layer.keys, layer.values, index)
    ]
    return kept[0], kept[1], kept[2], getattr(layer, "indexer_position_ids", None) is not None


def fill(layer: Any, keys: Tensor, values: Tensor, index: Tensor, positions: bool) -> None:
    """Let a cache layer, of transformers or native, hold these rows."""
    rows = keys.shape[2]
    if isinstance(layer, NativeLayer):
        layer.lazy_initialization(keys, values)
        layer._append(keys, values)
    else:
        layer.update(keys, values)
    (layer.update_index if index.ndim == 4 else layer.update_indexer)(index)
    if isinstance(layer, NativeLayer):
        layer.columns = rows
    if positions:
        layer.indexer_position_ids = torch.arange(rows).expand(3, 1, rows)


class IndexClock:
    """Seconds that a model's indexers take."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        self._began = 0.0
        for module in model.modules():
            if type(module).__name__.endswith("Indexer"):
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began


def measure(family: str, rows: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step by way, and of the index within it."""
    from transformers import DynamicCache

    models = {way: random_layer(family) for way in ("eager", "sdpa", "native")}
    for way, model in models.items():
        model.set_attn_implementation("eager" if way == "eager" else "sdpa")
    held = random_rows(models["eager"], rows)
    caches: dict[str, Any] = {way: DynamicCache(config=models[way].config) for way in ("eager", "sdpa")}
    caches["native"] = SparseCache(models["native"], native=True, capacity=rows + steps + 8)
    clocks = {way: IndexClock(model) for way, model in models.items()}
    for cache in caches.values():
        fill(cache.layers[0], *held)
    seconds: dict[str, list[float]] = {way: [] for way in models}
    indexing: dict[str, list[float]] = {way: [] for way in models}
    off = 0.0
    for step in range(steps + 2):
        ids = torch.full((1, 1), 3 + step % 200)
        logits = {}
        for way, model in models.items():
            clocks[way].seconds, began = 0.0, time.perf_counter()
            logits[way] = model(ids, use_cache=True, **cache_argument(caches[way])).logits
            if step > 1:  # of which two warm up
                seconds[way].append(time.perf_counter() - began)
                indexing[way].append(clocks[way].seconds)
        off = max(off, float((logits["native"] - logits["eager"]).abs().max() / logits["eager"].abs().max()))
    median = {way: statistics.median(spent) for way, spent in seconds.items()}
    return {
        "family": family,
        "shape": SHAPES[family][3],
        "rows": rows,
        "rows_read": caches["native"].stats().rows,
        "off": off,
        "ways": [
            {
                "way": way,
                "seconds": median[way],
                "least": min(seconds[way]),
                "most": max(seconds[way]),
                "index_seconds": statistics.median(indexing[way]),
                "times": median[way] / median["native"],
            }
            for way in models
        ],
    }


def tables(record: Mapping[str, Any]) -> Iterable[Table]:
    """One row for each family, number of rows and way."""
    table = Table("family", "rows", "read", "way", "ms a step", "of it the index", "to native", "logits off")
    for run in record["runs"]:
        for way in run["ways"]:
            shown = (f"{1e3 * way['seconds']:.1f}", f"{1e3 * way['index_seconds']:.1f}", f"{way['times']:.1f}")
            table.add_row(
                run["family"], f"{run['rows']:,}", f"{run['rows_read']:,.0f}", way["way"], *shown, f"{run['off']:.0e}"
            )
    yield table


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--family", action="append", choices=list(SHAPES), help="may be given several times")
    command.add_argument("--rows", default="32768", help="tokens in the cache, such as 8192,32768")
    command.add_argument("--steps", type=int, default=15, help="timed steps of each way")
    records.add_options(command)
    options = command.parse_args()
    lengths = integers(options.rows, "--rows") or []
    with torch.no_grad():
        runs = [measure(family, rows, options.steps) for family in options.family or list(SHAPES) for rows in lengths]
    environment = {"machine": machine(), "versions": versions()}
    record = {"benchmark": "native", **environment, "dtype": "float32", "steps": options.steps, "runs": runs}
    records.end(record, "native.json", tables, options)


if __name__ == "__main__":
    main()
