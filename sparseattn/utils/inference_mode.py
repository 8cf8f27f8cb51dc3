"""Tensors that stay are made outside `torch.inference_mode`: what is made within may not be changed outside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def keeps_tensors(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Run a function outside inference mode, without gradients, wherever it is called."""

    @functools.wraps(function)
    def outside(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside
