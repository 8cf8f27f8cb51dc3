"""Where a trace comes from, as its file says: the model, the text and the versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from sparseattn import __version__
from sparseattn.models.attention_routing import name_of
from sparseattn.models.cache_argument import version
from sparseattn.roles.fingerprint import fingerprint


def tokens_hash(input_ids: Tensor) -> str:
    """Return the SHA-256 by which a trace knows its tokens, of ids of any shape."""
    ids = input_ids.cpu().to(torch.int64).flatten().tolist()
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def origin(
    model: Any,
    input_ids: Tensor,
    original: str,
    stored: torch.dtype,
    model_id: str | None,
    text: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the `meta` of a trace. Args: as of `capture`; original: the model's attention; stored: the dtype kept."""
    # What a config says of where and by which version it was loaded is no property of the model.
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return {
        "model": model_id or name_of(model),
        "model_layers": model.config.get_text_config(decoder=True).num_hidden_layers,
        "config_hash": hashlib.sha256(canonical.encode()).hexdigest(),
        "weights": None if any(part.is_meta for part in model.parameters()) else fingerprint(model.named_parameters()),
        "text": dict(text or {}),
        "tokens_sha256": tokens_hash(input_ids),
        "attention": original,
        "dtype": str(stored).removeprefix("torch."),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"sparseattn": __version__, "torch": torch.__version__, "transformers": version()},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
