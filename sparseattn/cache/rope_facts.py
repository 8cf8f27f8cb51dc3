"""The RoPE that the keys of a prompt cache were turned by, as its file says it, held against the one applied here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.saap_artefact import rope_in_words, same_rope
from sparseattn.utils.hashing import tensors_hash

ROPE = "rope"  # the entry in what is said


def rope_said(rope: Rope | None) -> dict[str, Any] | None:
    """Return a RoPE for JSON: its numbers, as a hash of them would tell machines apart that round otherwise."""
    if rope is None:
        return None
    return {"inv_freq": rope.inv_freq.tolist(), "scaling": float(rope.scaling), "interleaved": rope.interleaved}


def check_rope(said: Mapping[str, Any], mine: Rope | None, layer: int) -> None:
    """Refuse keys that were turned by another RoPE than that of the layer: ValueError. Files of earlier releases say
    none."""
    if ROPE not in said:
        return
    theirs = _rope(said[ROPE])
    if not same_rope(theirs, mine):
        raise ValueError(
            f"the keys of layer {layer} were turned by {_in_words(theirs)} when it was written, and the layer applies "
            f"{_in_words(mine)} here"
        )


def _rope(said: Any) -> Rope | None:
    if said is None:
        return None
    try:
        return Rope(torch.tensor(said["inv_freq"], dtype=torch.float32), said["scaling"], said["interleaved"])
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(f"what it says of a RoPE is none: {error}") from error


def _in_words(rope: Rope | None) -> str:
    if rope is None:
        return "none of fixed frequencies"
    return f"{rope_in_words(rope)}, frequencies {tensors_hash({'inv_freq': rope.inv_freq})[:8]}"
