"""The hash of tensors is of their contents, however they lie in memory."""

from __future__ import annotations

import torch

from sparseattn.utils.hashing import tensors_hash


def test_views_hash_as_their_copies() -> None:
    whole = torch.arange(6.0).view(3, 2)
    for view in (whole.T, whole[:, :1], whole.view(3, 1, 2)[:1, :, 1].T, whole[:1, :1].T, whole[0, 0]):
        assert tensors_hash({"x": view}) == tensors_hash({"x": view.clone(memory_format=torch.contiguous_format)})
    assert tensors_hash({"x": whole}) != tensors_hash({"x": whole.T})
