"""Tensors that a selector is shown are not its own: what it writes to them in place is found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from sparseattn.cache.selection_checks import ContractError
from sparseattn.selectors.base import Selector


@contextlib.contextmanager
def only_read(selector: Selector, **shown: Tensor) -> Iterator[None]:
    """Hold a block, in which the selector is asked, against what it is shown.

    Raises:
        ContractError: one of the tensors was changed in place.
    """
    # Tensors of inference mode count no changes, so that they are copied.
    before = {name: x.clone() if x.is_inference() else x._version for name, x in shown.items()}
    yield
    for name, was in before.items():
        if not torch.equal(was, shown[name]) if isinstance(was, Tensor) else shown[name]._version != was:
            raise ContractError(
                f"{selector!r} changed {name} in place: what a selector is shown is not its own. Copy it first, as "
                f"float() returns the same tensor where it is float32 already"
            )
