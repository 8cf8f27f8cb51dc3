"""What a lossless generation refuses: requests beyond tokens, and caches that full attention cannot be had from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sparseattn.models.attention_routing import name_of
from sparseattn.models.errors import ModelError
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.models.transformers_classes import DynamicCache
from sparseattn.selectors.abilities import Evicts

# Arguments that `generate` hands on and that are heard, or change nothing.
HEARD = ("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position")
BESIDE_TOKENS = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict_in_generate",
)


def check_request(config: Any, inputs: dict[str, Any], synced: bool) -> None:
    """Refuse what is asked for beside tokens."""
    if config.num_beams != 1:
        raise ValueError(
            f"drafts are checked for greedy decoding and sampling, not for beams: num_beams=1, got {config.num_beams}"
        )
    if config.use_cache is False:
        raise ValueError("drafts and full attention share a cache: leave use_cache on")
    if synced:
        raise ValueError("synced_gpus is not supported: sequences of one process are drafted alone")
    for name in BESIDE_TOKENS:
        if getattr(config, name, False):
            raise ValueError(f"a lossless generation returns tokens alone: leave {name} out")
    if more := [name for name, value in inputs.items() if name not in HEARD and isinstance(value, Tensor)]:
        raise ValueError(f"a lossless generation goes on from input_ids alone: leave {', '.join(sorted(more))} out")


def check_processors(processors: Any, draft: int | str) -> None:
    """Refuse what makes scores of more than the tokens so far: drafts ask for the scores of some tokens twice."""
    for processor in processors:
        name = type(processor).__name__
        if name == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
            raise ValueError("guidance_scale runs the model a second time with a cache of its own: leave it out")
        if name == "SynthIDTextWatermarkLogitsProcessor" and draft != 0:
            raise ValueError(
                "SynthID's watermark depends on the order of its calls, and not all drafts are kept: draft=0, or a "
                "WatermarkingConfig, which depends on the tokens alone"
            )


def check_frequencies(model: Any, stored: int, positions: Tensor, new: float, several: int, draft: int | str) -> None:
    """Refuse positions from which on the model's RoPE turns a token by what comes with it, not by its place alone.

    Dynamic NTK makes its frequencies for the longest sequence of a pass, LongRoPE takes others past a length, where
    some models make all rows anew. A check of drafts would turn its tokens otherwise than steps of one token do.

    Args:
        model: of transformers.
        stored: tokens that the cache holds.
        positions: `[B,n]` of the prompt's tokens behind these.
        new: most tokens to generate.
        several: positions beyond the last that sequences of a batch may be drafted at.
        draft: as of `Lossless`.

    Raises:
        ModelError: they may be reached.
    """
    first, last = int(positions.max()) + 1, int(positions.max()) + new + several * (len(positions) > 1)
    for kind, length in _following(model):
        if kind == "longrope":
            there = int(positions.min()) if stored else first
            refused, remedy = there <= length < last, ""
        else:
            refused = last > length and (draft != 0 or len(positions) > 1)
            remedy = " one sequence at a time with draft=0,"
        if refused:
            raise ModelError(
                f"the RoPE of {name_of(model)} ({kind}) has other frequencies in a sequence of more than {length} "
                f"tokens, and this generation may go from {first} to {last}: checks of drafts would not be full "
                f"attention there. Ask for fewer tokens (max_new_tokens),{remedy} or generate without Lossless"
            )


def _following(model: Any) -> Iterator[tuple[str, int]]:
    """Yield each kind of RoPE whose frequencies follow the length, and the length up to which they do not."""
    for module in model.modules():
        kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str) or config is None:
                continue
            if kind == "longrope":
                parameters = config.rope_parameters if layers is None else config.rope_parameters[layers]
                yield kind, int(parameters["original_max_position_embeddings"])
            elif "dynamic" in kind:
                yield kind, int(module.original_max_seq_len)


def check_given(given: Any, model: Any) -> None:
    """Refuse a cache of transformers unless it is plain and empty: a `SparseCache` takes the place of such a one."""
    if given is None:
        return
    # Recurrent layers do not count tokens; where there are no others, SparseCache says why there can be none.
    layers = given.layers if type(given) is DynamicCache else []
    if type(given) is not DynamicCache or any(x.get_seq_length() for x in layers if hasattr(x, "get_seq_length")):
        raise ValueError(
            f"lossless drafts keep their rows in a SparseCache, which crops single rows: give generate one that "
            f"was made for {name_of(model)}, or no cache, got a {type(given).__name__}"
        )
    if getattr(given, "offloading", False):
        raise ValueError(
            "lossless drafts keep their rows in a SparseCache, and a cache that offloads was asked for: leave it out, "
            'and for rows in main memory give Lossless sealed_device="cpu"'
        )


def check_cache(cache: SparseCache) -> None:
    """Refuse a cache that full attention cannot be had from, or that does not go back."""
    if any(layer.index is not None for layer in cache.prepared.layers.values()):
        raise ModelError(
            f"{name_of(cache.model)} has an index of its own, so that full attention is not what it does: run it with "
            f"SparseCache(native=True), which gives its own tokens"
        )
    for index, layer in cache.sparse_layers.items():
        for part in layer.parts:
            selector = part.rows.selector
            if selector.find(Evicts):
                raise ValueError(
                    f"layer {index}: {selector!r} drops rows for good, which full attention would have to read: draft "
                    f"with a method that keeps them, such as lowbit or quest"
                )
            if part.rows.codec is not None:
                raise ValueError(
                    f"layer {index}: rows={part.rows.codec} keeps rounded rows, and full attention over these is not "
                    f"the model's own: leave rows out"
                )
    for index, layer in enumerate(cache.layers):
        # One with a convolution alone says that it crops once it holds tokens: a later turn is refused as the first is.
        croppable = getattr(layer, "is_croppable", True) and not hasattr(layer, "conv_states")
        if getattr(layer, "is_sliding", False) and not hasattr(layer, "activate_past_recording"):
            croppable = False
        if not croppable:
            raise ModelError(
                f"layer {index} of {name_of(cache.model)} keeps a state that does not go back "
                f"({type(layer).__name__}), so rejected drafts would stay in it: lossless drafts need layers that "
                f"crop, and for sliding windows transformers 5.23 or later"
            )
