"""Route the attention calls of a transformers model to a function of ours, or on to the model's own implementation."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparseattn.models.errors import ModelError
from sparseattn.models.native_choice import PASSED, choice_of, passed

HIDES = -1e4  # what a mask adds to the logits of hidden keys, or less
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
        """The layer's number."""
        return int(self.module.layer_idx)  # type: ignore[arg-type]

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return float(self.options.get("scaling") or self.query.shape[-1] ** -0.5)

    @property
    def window(self) -> int | None:
        """Tokens of a sliding window, None for the whole context."""
        return self.options.get("sliding_window")

    @property
    def causal(self) -> bool:
        """Whether queries do not attend to keys after their own, in a pass without a past.

        Without `is_causal` a layer counts as causal, as it does in transformers. With it false, its mask may still be.
        """
        said = self.options.get("is_causal")
        if (getattr(self.module, "is_causal", True) if said is None else said) or self.query.shape[2] == 1:
            return True
        if not isinstance(self.mask, Tensor) or self.mask.ndim != 4:
            return False
        last = self.mask[..., 0, -1]
        return not last.any() if last.dtype == torch.bool else bool((last <= HIDES).all())


# Arguments of an attention function that change its output beyond softmax attention over keys and values.
BEYOND_SOFTMAX = {
    "softcap": "soft-caps its logits (softcap)",
    "s_aux": "adds a learned sink to its softmax (s_aux)",
    "position_bias": "adds a bias to its logits (position_bias)",
}


def beyond_softmax(call: Call) -> str | None:
    """Return what the layer does beyond softmax attention over keys and values, in words, or None."""
    if BEYOND_SOFTMAX.keys().isdisjoint(call.options):
        return None
    return " and ".join(words for name, words in BEYOND_SOFTMAX.items() if call.options.get(name) is not None) or None


def implementation(model: Any) -> str:
    """Return the name of the attention implementation of the model's text part.

    Raises:
        ModelError: the model's attention cannot be routed.
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


def check_causal(model: Any, calls: Iterable[Call]) -> None:
    """Refuse, by ModelError, a model whose tokens attend to later ones, given the calls of a pass without a past."""
    for call in calls:
        if not call.causal:
            raise ModelError(
                f"layer {call.layer} of {name_of(model)} attends to later tokens too, only causal models are served "
                f"(BERT and its kin are causal with is_decoder=True)"
            )


def name_of(model: Any) -> str:
    """Return the name that the model was loaded by, or its class's."""
    return model.config._name_or_path or type(model).__name__


def register(name: str, function: Callable[..., tuple[Tensor, Any]], original: str) -> None:
    """Tell transformers of an attention function under a name, with the masks of the implementation `original`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(name, function)
    if original in ALL_MASK_ATTENTION_FUNCTIONS:  # without a function of the same name there would be no mask at all
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])


class Route:
    """Send a model's attention calls to `function`, with the masks of its own implementation, from `set` to `undo`.

    Args:
        model: a model of transformers.
        original: the name of its own implementation, as `implementation` returns it.
        purpose: part of the name under which `function` is registered. Names cannot be unregistered, so a purpose
            always goes with the same function.
        function: an attention function of transformers.
    """

    def __init__(self, model: Any, original: str, purpose: str, function: Callable[..., tuple[Tensor, Any]]) -> None:
        from transformers import PreTrainedModel

        # One name for each implementation. It contains the original's, which models look for "flash" in.
        self.name = f"{PREFIX}{purpose}_{original.replace('/', '_')}"
        _ORIGINALS[self.name] = original
        register(self.name, function, original)
        # Not through set_attn_implementation, which would look on the hub for a kernel of a name with "flash" in it,
        # and not through the configs' property, which would change the sub-configs of a config with it.
        configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
        self._before = [(config, config._attn_implementation_internal) for config in configs.values()]

    def set(self) -> None:
        """Name our function in every config."""
        for config, _ in self._before:
            config._attn_implementation_internal = self.name

    def undo(self) -> None:
        """Give every config the implementation back that it had."""
        for config, before in self._before:
            config._attn_implementation_internal = before


NAMELESS = ("sdpa", "eager")  # implementations that do not look for their name in a config


def delegate(call: Call, original: str) -> tuple[Tensor, Any]:
    """Run the attention that the model would have run, without a change that another thread's pass could see.

    Args:
        call: as the layer made it.
        original: the name of the model's own implementation.

    Returns:
        Output `[B,n,HG,D]` and what the implementation returns beside it.

    Where the model has an index of its own, what that chose is applied, as the model itself does with its own names.

    Raises:
        ModelError: the model's code has no function of that name.
    """
    mask, options = _with_choice(call)
    home: Any = sys.modules[type(call.module).__module__]
    function = home.ALL_ATTENTION_FUNCTIONS.get_interface(original, getattr(home, "eager_attention_forward", None))
    if function is None:
        raise ModelError(f"{home.__name__} has no eager_attention_forward to run")
    module = call.module if original in NAMELESS else _with_config_naming(call.module, original)
    out, weights = function(module, call.query, call.key, call.value, mask, **options)
    return out, weights


def _with_choice(call: Call) -> tuple[Any, dict[str, Any]]:
    """Return the mask and the options of a call, what the model's own index chose applied to the mask."""
    if passed(call.options) is None:
        return call.mask, call.options
    tokens, columns = call.query.shape[2], call.key.shape[2]
    choice = choice_of(call.module, call.options, call.mask, tokens, columns, padded=True)
    options = {name: value for name, value in call.options.items() if name not in PASSED}
    return choice.as_mask(call.query, call.query.shape[1]), options


def _with_config_naming(module: Any, original: str) -> Any:
    """Return a copy of the module with a config that names `original`, where flash attention reads it."""
    twin, config = copy.copy(module), copy.copy(module.config)
    config._attn_implementation_internal = original
    twin.config = config
    return twin


def own_implementation(module: Any) -> str:
    """Return the name of the model's own implementation, whatever the calls of its layer are routed to now."""
    name = module.config._attn_implementation or "eager"
    return _ORIGINALS.get(name, name)
