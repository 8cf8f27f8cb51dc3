"""Route the attention of a transformers model through a function of ours, and pass calls on to the model's own."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparseattn.models.errors import ModelError

PREFIX = "sparseattn_"  # of the names that this module registers
_ORIGINALS: dict[str, str] = {}  # such a name -> the implementation that it stands in for


@dataclass
class Call:
    """One call of an attention function."""

    module: nn.Module
    query: Tensor  # [B,HG,n,D]
    key: Tensor  # [B,H,N,D]
    value: Tensor  # [B,H,N,D]
    mask: Any
    options: dict[str, Any]

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)  # type: ignore[arg-type]

    @property
    def scale(self) -> float:
        return float(self.options.get("scaling") or self.query.shape[-1] ** -0.5)

    @property
    def window(self) -> int | None:
        return self.options.get("sliding_window")


# What an attention function may be given that changes its output and that keys, values and a scale do not tell.
NOT_HELD = {
    "softcap": "soft-caps its logits (softcap)",
    "s_aux": "adds a learned sink to its softmax (s_aux)",
    "position_bias": "adds a bias to its logits (position_bias)",
}


def not_held(call: Call) -> str | None:
    """What the layer does beyond softmax attention, in words, or None."""
    return " and ".join(words for name, words in NOT_HELD.items() if call.options.get(name) is not None) or None


def implementation(model: Any) -> str:
    """The name of the attention implementation of the model's text part.

    Raises:
        ModelError: a model whose attention cannot be routed.
    """
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name_of(model)} is an encoder-decoder, only decoder-only models are served")
    if not model._can_set_attn_implementation():
        raise ModelError(f"{name_of(model)} has attention code of its own, outside transformers' AttentionInterface")
    name = model.config.get_text_config(decoder=True)._attn_implementation or "eager"
    if name.startswith(PREFIX):
        raise ModelError(
            f"the attention of {name_of(model)} is routed already, by a SparseCache or a capture: undo that"
        )
    return name


def name_of(model: Any) -> str:
    """What the model was loaded as, or its class."""
    return model.config._name_or_path or type(model).__name__


class Route:
    """Sends the model's attention calls to `function`, with the masks of its own implementation, from `set` to `undo`.

    Args:
        model: a model of transformers.
        original: the name of its own implementation, as `implementation` gives it.
        purpose: part of the name under which `function` is registered for good, as names cannot be unregistered.
        function: takes what an attention function of transformers takes; the same one for a purpose at all times.
    """

    def __init__(self, model: Any, original: str, purpose: str, function: Callable[..., tuple[Tensor, Any]]) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        # One name for each implementation. It contains the original's, which models look for "flash" in. Without a
        # mask function of the same name there would be no mask at all.
        self.name = f"{PREFIX}{purpose}_{original.replace('/', '_')}"
        _ORIGINALS[self.name] = original
        AttentionInterface.register(self.name, function)
        if original in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(self.name, ALL_MASK_ATTENTION_FUNCTIONS[original])
        # Not through set_attn_implementation, which would look on the hub for a kernel of a name with "flash" in it,
        # and not through the configs' property, which would change the sub-configs of a config with it.
        configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
        self._before = [(config, config._attn_implementation_internal) for config in configs.values()]

    def set(self) -> None:
        """Has every config name our function."""
        for config, _ in self._before:
            config._attn_implementation_internal = self.name

    def undo(self) -> None:
        """Gives every config back the implementation it had."""
        for config, before in self._before:
            config._attn_implementation_internal = before


# Their functions look at no name in a config.
NAMELESS = ("sdpa", "eager")


def delegate(call: Call, original: str) -> tuple[Tensor, Any]:
    """The attention that the model would have run. Changes nothing that another thread's pass could see.

    Args:
        call: as the layer made it.
        original: the name of the model's own implementation.

    Raises:
        ModelError: the model's code has no function of that name.
    """
    home: Any = sys.modules[type(call.module).__module__]
    function = home.ALL_ATTENTION_FUNCTIONS.get_interface(original, getattr(home, "eager_attention_forward", None))
    if function is None:
        raise ModelError(f"{home.__name__} has no eager_attention_forward to run")
    module = call.module if original in NAMELESS else _by_its_name(call.module, original)
    out, weights = function(module, call.query, call.key, call.value, call.mask, **call.options)
    return out, weights


def _by_its_name(module: Any, original: str) -> Any:
    """The module again, with a config of its own that names `original`: flash attention reads it there."""
    twin, config = copy.copy(module), copy.copy(module.config)
    config._attn_implementation_internal = original
    twin.config = config
    return twin


def own(module: Any) -> str:
    """The name of the model's own implementation, whatever a layer's calls are routed through at this moment."""
    name = module.config._attn_implementation or "eager"
    return _ORIGINALS.get(name, name)
