"""The index that an attention layer of a model has of its own: whether there is one, and whether it can be followed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparseattn.models.errors import ModelError
from sparseattn.models.native_choice import has_index, passed

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of multi-head latent attention
READ = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes that weights are multiplied in
CLOSE = 1e-2  # of the norm, between a projection of 16 bits and the same one here


@dataclass(frozen=True)
class NativeIndex:
    """An index of a layer's own.

    Args:
        passes: the name under which the layer passes what it chose; None: it folds that into its mask.
        latent: whether the layer keeps one latent for all heads (MLA).
        unreadable: why it cannot be followed, in words; None: it can.
        fixed: why it cannot be left out, so that a selector chooses instead, in words; None: it can.
    """

    passes: str | None
    latent: bool
    unreadable: str | None
    fixed: str | None


@dataclass(frozen=True, eq=False)
class CachedIndex:
    """What became of a layer in a pass with a cache, which tells releases of transformers apart.

    Args:
        cache: that of transformers, behind the pass.
        layer: the layer's number.
        keys: those that it attended to.
        folded: whether the mask that it attended by is one of its own making.
    """

    cache: Any
    layer: int
    keys: Tensor
    folded: bool

    def outside(self) -> str | None:
        """Return what the index keeps outside the layers of the cache, where nobody can take it back, in words."""
        if hasattr(self.cache, "position_ids"):
            return "keeps the positions of all tokens beside the layers of the cache, as releases before 5.21 do"
        cached = self._held()
        return None if any(hasattr(cached, name) for name in INDEX_KEYS) else "keeps the keys of its index to itself"

    def expanded(self) -> bool:
        """Whether the cache holds the keys of every head, as they were attended to."""
        cached_keys = getattr(self._held(), "keys", None)
        return isinstance(cached_keys, Tensor) and cached_keys.shape == self.keys.shape

    def _held(self) -> Any:
        layers = self.cache.layers
        return layers[self.layer] if self.layer < len(layers) else None


INDEX_KEYS = ("update_indexer", "update_index")  # of transformers' cache layers


def native_index(module: nn.Module, options: Mapping[str, Any], kept: CachedIndex) -> NativeIndex | None:
    """Return the index of a layer's attention, by a call of it; None where it has none."""
    if not has_index(module, options):
        return None
    kind, name = type(module).__name__, passed(options)
    if isinstance(getattr(module, "indexer", None), nn.Module) and (outside := kept.outside()) is not None:
        return NativeIndex(name, False, f"{kind} {outside}", f"{kind} {outside}")
    fixed = None  # where a layer passes nothing, its mask is left out
    if name is not None and kept.folded:
        fixed = f"{kind} passes {name} and folds them into its mask too"
    if not hasattr(module, "expand_kv"):
        return NativeIndex(name, False, None, fixed)
    if name is not None and kept.expanded():
        why = f"{kind} stores keys and values of every head, as releases before 5.18 do, and latents are read"
        return NativeIndex(name, False, why, fixed)
    why_not = _unreadable(module, name)
    return NativeIndex(name, True, why_not, why_not or fixed)


def _unreadable(module: Any, name: str | None) -> str | None:
    """Return why a latent layer cannot be followed, in words."""
    kind = type(module).__name__
    if name is None:
        return f"{kind} passes no indices and folds them into a mask over keys that it expands at every step"
    if getattr(module, "is_kv_shared_layer", False) or getattr(module, "store_full_length_kv", False):
        return f"{kind} shares latents between layers"
    lacking = [size for size in SIZES if not isinstance(getattr(module, size, None), int)]
    if lacking:
        return f"{kind} has no {lacking[0]}, which multi-head latent attention has"
    projection = getattr(module, "kv_b_proj", None)
    if not isinstance(projection, nn.Linear) or projection.bias is not None:
        return f"{kind} projects latents by {type(projection).__name__}, and a linear layer without bias is read"
    weight: Tensor = projection.weight
    if weight.dtype not in READ or weight.device.type == "meta":
        what = f"as {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
        return f"{kind} keeps the projection of latents {what}, and float32, bfloat16 or float16 in memory is read"
    return None if _expands(module) else f"{kind} makes keys and values of latents in another way than MLA"


@torch.no_grad()
def _expands(module: Any) -> bool:
    """Whether a layer makes keys and values of latents by its projection alone."""
    weight: Tensor = module.kv_b_proj.weight
    rank, rope = module.kv_lora_rank, module.qk_rope_head_dim
    draw = torch.Generator().manual_seed(0)
    latents, turned = (
        torch.randn(1, 1, 3, size, generator=draw).to(weight.device, weight.dtype) for size in (rank, rope)
    )
    keys, values = module.expand_kv(latents, turned)
    to_keys, to_values = projections(module)
    expected = torch.cat(
        [torch.einsum("bonr,hkr->bhnk", latents, to_keys), turned.expand(-1, len(to_keys), -1, -1)], -1
    )
    summed = torch.einsum("bonr,hvr->bhnv", latents, to_values)
    pairs = ((keys, expected), (values, summed))
    return all(x.shape == y.shape and bool((x - y).float().norm() <= CLOSE * y.float().norm()) for x, y in pairs)


def projections(module: Any) -> tuple[Tensor, Tensor]:
    """Return what makes keys `[H,K,R]` and values `[H,V,R]` of latents of R channels, views of the weights."""
    keys = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(-1, keys + module.v_head_dim, module.kv_lora_rank)
    return weight[:, :keys], weight[:, keys:]


def native_lists(calls: Mapping[int, tuple[nn.Module, Mapping[str, Any]]], tokens: int) -> dict[int, tuple[int, int]]:
    """Return, of each layer with an index of its own, how many lists of how many rows it chooses of so many tokens.

    Args:
        calls: the module and the options of a call of each layer.
        tokens: of the text.

    Raises:
        ModelError: an index that does not say how many rows it chooses.
    """
    lists_of: dict[int, tuple[int, int]] = {}
    latest = None
    for layer in sorted(calls):
        module, options = calls[layer]
        if not has_index(module, options):
            continue
        indexer = getattr(module, "indexer", None)
        latest = latest if indexer is None else _rows_of(indexer)  # without one of its own it reads the last one's
        if latest is None:
            raise ModelError(
                f"the index of layer {layer}, a {type(indexer or module).__name__}, does not say how many rows it "
                f"chooses: none of {', '.join(map(' and '.join, ROWS))} is in it"
            )
        lists = options["block_indices"].shape[1] if passed(options) == "block_indices" else 1
        lists_of[layer] = lists, min(latest, tokens)
    return lists_of


ROWS = (("index_topk",), ("topk_blocks", "block_size"), ("token_budget", "compress_ratio"))


def _rows_of(indexer: Any) -> int | None:
    """Return the most rows that an index chooses."""
    for names in ROWS:
        sizes = [size for name in names if isinstance(size := getattr(indexer, name, None), int)]
        if len(sizes) < len(names):
            continue
        if names[0] == "token_budget":
            return sizes[0] + sizes[1] - 1  # QSA reads the rows of an unfinished group besides
        return math.prod(sizes)
    return None


def key_bytes(module: nn.Module) -> int | None:
    """Return the bytes of a token's keys in a layer's index: 0 where it reads the choice of another layer; None: it
    does not say."""
    indexer: Any = getattr(module, "indexer", None)
    if indexer is None:
        return 0
    size = getattr(indexer, "index_head_dim", getattr(indexer, "head_dim", None))
    width = next((weight.element_size() for weight in indexer.parameters()), None)
    if not isinstance(size, int) or width is None:
        return None
    return size * int(getattr(indexer, "index_kv_heads", 1)) * width
