"""What full attention generates, and what lossless generation does: for the laws that compare them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparseattn.models.lossless import LosslessOutput, generate_lossless
from tests.models.tiny import SMALL

NEW = 24


def dense(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What `generate` makes of it with full attention."""
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | options)


def dense_once(model: Any, inputs: dict[str, Tensor], new: int = NEW) -> Tensor:
    """As `dense`, made once of each prompt for all tests that compare with it."""
    ids, mask = (tuple(map(tuple, inputs[name].tolist())) for name in ("input_ids", "attention_mask"))
    return _dense_once(model, ids, mask, new)


@functools.cache
def _dense_once(model: Any, ids: tuple[tuple[int, ...], ...], mask: tuple[tuple[int, ...], ...], new: int) -> Tensor:
    return dense(model, {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}, max_new_tokens=new)


def lossless(
    model: Any, inputs: dict[str, Tensor], selector: Any, budget: Any, draft: Any, **options: Any
) -> LosslessOutput:
    options = {"max_new_tokens": NEW, "do_sample": False, "settings": SMALL} | options
    given = dict(inputs)
    return generate_lossless(model, given.pop("input_ids"), selector, budget, draft, **given, **options)


def whole(ids: Tensor) -> dict[str, Tensor]:
    """Prompts without padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
