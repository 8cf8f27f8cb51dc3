"""Tensors that a selector is shown are not its own: what it writes to them in place is found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from sparseattn.cache.selection_checks import ContractError
from sparseattn.selectors.base import Selector


@contextlib.contextmanager
def only_read(selector: Selector, **shown: Tensor) -> Iterator[None]:
    """Hold a block, in which the selector is asked, against what it is shown.

    Raises:
        ContractError: one of the tensors was changed in place.
    """
    before = {name: tensor._version for name, tensor in shown.items() if not tensor.is_inference()}
    yield
    for name, version in before.items():
        if shown[name]._version != version:
            raise ContractError(
                f"{selector!r} changed {name} in place, which are not its own: float() returns the same tensor where "
                f"it is float32 already, so write x = x / y in place of x /= y"
            )
