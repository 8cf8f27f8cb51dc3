"""Where a model takes its inputs: weights that accelerate offloads lie nowhere between their layers' passes."""

from __future__ import annotations

from typing import Any

import torch


def input_device(model: Any) -> torch.device:
    """Return the device of a model's inputs: its own, or that on which its first offloaded part is to run."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hooks = (getattr(part, "_hf_hook", None) for part in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((place for place in places if place is not None), "cpu"))
