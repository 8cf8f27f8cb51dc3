"""What of a language model a decode step moves: its layers' KV heads, and its weights.

Well-known models are known by name (`sparseattn/data/models.json`, each with the source of its figures); any other by
its `config.json` of transformers. Parameters follow from the config, for decoders whose MLP has a gate: norms, biases
and anything but text are not counted, which is below 1 % of the published totals.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseattn.core.step_cost import Shape
from sparseattn.cost_model.known_models import named
from sparseattn.utils.json_fields import FieldError, Flag, Items, Maybe, Number, Object, Text
from sparseattn.utils.json_text import JsonError, parse_object
from sparseattn.utils.suggest import did_you_mean

# Types of transformers whose weights are those that `_weights` counts.
COUNTED = (
    *("gemma", "gemma2", "gemma3_text", "gpt_oss", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"),
    *("qwen3_moe", "smollm3"),
)
BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}  # of a parameter
MXFP4 = 4.25 / 8  # 32 numbers of 4 bits share a scale of 8, in the experts alone
FULL, SLIDING = "full_attention", "sliding_attention"
_COUNT = Number(1, 1e9, whole=True)
CONFIG = Object(
    {
        "model_type": Text(empty=False),
        "hidden_size": _COUNT,
        "num_hidden_layers": _COUNT,
        "num_attention_heads": _COUNT,
        "num_key_value_heads": _COUNT,
        "vocab_size": _COUNT,
    },
    {
        "head_dim": Maybe(_COUNT),
        "intermediate_size": _COUNT,
        "moe_intermediate_size": _COUNT,
        "num_experts": _COUNT,
        "num_local_experts": _COUNT,
        "num_experts_per_tok": _COUNT,
        "max_position_embeddings": _COUNT,
        "sliding_window": Maybe(_COUNT),
        "use_sliding_window": Flag(),
        "sliding_window_pattern": _COUNT,
        "layer_types": Maybe(Items(Text(among=(FULL, SLIDING)))),
        "tie_word_embeddings": Flag(),
        "quantization_config": Maybe(Object({"quant_method": Text()})),
    },
)

INDEX = Object({"metadata": Object({"total_size": Number(1, 1e15)})})  # of safetensors files


class ModelShapeError(ValueError):
    """A model that is not known, or a config that tells too little, in one sentence."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes and parameters of a model, by how often a step reads them.

    Args:
        lookup: bytes of an input embedding of its own, of which a step reads a row a token.
        always: bytes that every step reads.
        expert: bytes of one expert, in all layers together; 0 without experts.
        parameters: of the three: a lookup's, those that every token needs, and one expert's.
        experts, chosen: experts of a layer, and how many of them a token needs.
    """

    lookup: float
    always: float
    expert: float
    parameters: tuple[int, int, int]
    experts: int = 0
    chosen: int = 0

    @property
    def total(self) -> float:
        """Bytes in memory."""
        return self.lookup + self.always + self.experts * self.expert

    @property
    def count(self) -> int:
        """Parameters."""
        lookup, always, expert = self.parameters
        return lookup + always + self.experts * expert

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.parameters[1] + self.chosen * self.parameters[2]

    def read(self, batch: int) -> float:
        """Return the bytes that a step of so many sequences reads, if tokens choose their experts at random."""
        met = self.experts * (1 - (1 - self.chosen / self.experts) ** batch) if self.experts else 0.0
        return self.always + met * self.expert

    def flops(self, batch: int) -> float:
        """Return the additions and multiplications of a step of so many sequences."""
        return 2.0 * self.active * batch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as decoding meets it.

    Args:
        name: by which it was asked for.
        source: where the figures are from.
        full, sliding: layers that attend to the whole context, and to the last `window` tokens.
        num_kv_heads, group, head_dim: of every layer.
        weights: see `Weights`.
        longest: tokens that the model was made for; None where its config does not say.
        note: what else one must know, a clause.
    """

    name: str
    source: str
    full: int
    sliding: int
    window: int
    num_kv_heads: int
    group: int
    head_dim: int
    weights: Weights
    longest: int | None = None
    note: str = ""

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> ModelShape:
        """Return a model by its name in `models.json`, or by the path of its `config.json` or of the folder around it.

        Raises:
            ModelShapeError: neither, or a config that tells too little or of a model that is not counted here.
        """
        known = named()
        if isinstance(name, str) and name in known:
            entry = known[name]
            return _shape(entry["config"], name, entry["source"], None, entry.get("note", ""))
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ModelShapeError(
                f"a model is one of {', '.join(known)}, or a config.json or the folder that it is in, got "
                f"{str(name)!r}{did_you_mean(str(name), known)}"
            )
        try:
            config = parse_object(
                path.read_bytes(), finite=False, once=False
            )  # fields that are not read may hold anything
            return _shape(config, str(name), str(path), _stored(path.parent))
        except (JsonError, FieldError, ModelShapeError) as error:
            raise ModelShapeError(f"{path} does not tell what a decode step moves: {error}") from None

    def attention(self, batch: int, dtype: torch.dtype) -> Shape:
        """Return the shape of a layer's step."""
        return Shape(batch, self.num_kv_heads, self.group, self.head_dim, dtype)

    def kv_bytes(self, context: int, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence's keys and values; a sliding layer keeps no more than its window."""
        rows = self.full * context + self.sliding * min(context, self.window)
        return rows * self.num_kv_heads * self.attention(1, dtype).row_bytes


def _shape(config: Mapping[str, Any], name: str, source: str, stored: int | None, note: str = "") -> ModelShape:
    """Return the shape of a config; `stored` are the bytes of its weights' files, where these lie beside it."""
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    if "kv_lora_rank" in config:
        raise ModelShapeError("it has kv_lora_rank: latent attention, whose cache is not counted here")
    CONFIG.check(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise ModelShapeError(f"num_attention_heads ({heads}) is a multiple of num_key_value_heads, got {kv_heads}")
    head_dim = config.get("head_dim")
    if head_dim is None:
        if config["model_type"].startswith("gemma"):  # of which transformers has a default of its own
            raise ModelShapeError("head_dim is missing")
        head_dim = config["hidden_size"] // heads
    layers = config["num_hidden_layers"]
    sliding = _sliding_layers(config)
    weights = _weights(config, heads * head_dim, kv_heads * head_dim, stored)
    return ModelShape(
        name,
        source,
        layers - sliding,
        sliding,
        config["sliding_window"] if sliding else 0,
        kv_heads,
        heads // kv_heads,
        head_dim,
        weights,
        config.get("max_position_embeddings"),
        note,
    )


def _sliding_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers attend to a sliding window, as transformers reads these fields."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise ModelShapeError(f"layer_types has an entry for each of {layers} layers, got {len(types)}")
        sliding = types.count(SLIDING)
    elif config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0
    else:
        pattern = config.get("sliding_window_pattern")
        if pattern is None and config["model_type"] not in ("mistral", "mixtral", "phi3"):
            raise ModelShapeError("layer_types is missing: it has a sliding_window and does not say in which layers")
        sliding = layers if pattern is None else layers - layers // pattern
    if sliding and config.get("sliding_window") is None:
        raise ModelShapeError("sliding_window is missing")
    return sliding


def _weights(config: Mapping[str, Any], query: int, kv: int, stored: int | None) -> Weights:
    """Return the weights by the config's sizes; with `stored` bytes of files they are scaled to these."""
    kind, hidden, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    if kind not in COUNTED and stored is None:
        raise ModelShapeError(
            f"the weights of model_type {kind!r} are not counted from a config (they are for {', '.join(COUNTED)}): "
            f"give the folder in which its safetensors files lie too"
        )
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    needed = ["num_experts_per_tok"] if experts else []
    needed += [] if experts and "moe_intermediate_size" in config else ["intermediate_size"]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    for name in needed:
        if name not in config:
            raise ModelShapeError(f"{name} is missing")
    if dtype not in BYTES:
        raise ModelShapeError(f"torch_dtype is one of {', '.join(BYTES)}, got {dtype!r}")
    size, packed = BYTES[dtype], BYTES[dtype]
    if quantized := config.get("quantization_config"):
        method = quantized["quant_method"]
        if method == "mxfp4":
            packed = MXFP4
        elif stored is None:
            raise ModelShapeError(
                f"its weights are quantized by {method!r}: give the folder in which its safetensors files lie too"
            )
    inner = config.get("moe_intermediate_size") if experts else None
    mlp = 3 * hidden * (inner or config["intermediate_size"])  # gate, up and down
    table = config["vocab_size"] * hidden
    tied = config.get("tie_word_embeddings", kind.startswith("gemma"))
    always = table + layers * (2 * hidden * (query + kv) + (hidden * experts if experts else mlp))
    counts = 0 if tied else table, always, layers * mlp if experts else 0
    weights = Weights(
        counts[0] * size, always * size, counts[2] * packed, counts, experts, config.get("num_experts_per_tok", 0)
    )
    if stored is None:
        return weights
    scale = stored / weights.total
    return Weights(
        weights.lookup * scale, weights.always * scale, weights.expert * scale, counts, weights.experts, weights.chosen
    )


def _stored(folder: Path) -> int | None:
    """Return the bytes of the weights that lie in a folder, by their index or by their files; None without any."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index_json = parse_object(index.read_bytes())
        INDEX.check(index_json, index.name)
        return int(index_json["metadata"]["total_size"])
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
