"""One sentence for what is no tensor of torch, at the cache's door and at that of `attend`."""

from __future__ import annotations

from torch import Tensor


def only_tensors(**parts: object) -> None:
    """Each is a tensor of torch; else ValueError with the name, and what makes one."""
    for name, part in parts.items():
        if part is None:
            raise ValueError(f"{name} is a torch.Tensor, got None")
        if not isinstance(part, Tensor):
            kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
            made = "torch.from_numpy" if kind == "numpy.ndarray" else "torch.tensor"
            raise ValueError(f"{name} is a torch.Tensor, got a {kind}: {made}({name}) makes one")
