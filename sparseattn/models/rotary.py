"""Which RoPE an attention layer of a transformers model applied, told by what it did and never by its name.

Three facts have to agree: the `cos, sin` that the layer was given are those of some frequencies that the model holds;
turning the recorded queries and keys back with these frequencies, in one of the two pairings, gives what the layer's
projections put out; and the layer is given the same frequencies until the end. Whatever fails is a sentence.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparseattn.core.rope import Rope


class NoRope(Exception):
    """Why a layer's RoPE is not known."""


class Watch:
    """While it is open, what attention layers are given and what their submodules put out, in passes of this thread.

    Args:
        modules: the attention module of each layer to watch.

    Attributes:
        embeddings: of each layer, the `cos, sin` that it was given last, or None.
        tensors: of each layer, all tensors that it was given last, its mask among them.
        outputs: of each layer, the outputs of its submodules in the last pass.
        outputs_too: whether outputs are kept, which holds on to their memory.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.embeddings: dict[int, tuple[Tensor, Tensor] | None] = {}
        self.tensors: dict[int, list[Tensor]] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        self.outputs_too = True
        self._modules = dict(modules)
        self._handles: list[RemovableHandle] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Watch:
        for index, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._given(index), with_kwargs=True))
            self._handles += [child.register_forward_hook(self._put_out(index)) for child in module.children()]
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _given(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if threading.get_ident() != self._thread:
                return
            pairs = [options.get("position_embeddings"), *args]
            tensors = (x for x in pairs if isinstance(x, tuple) and [type(y) for y in x] == [Tensor, Tensor])
            self.embeddings[index] = next(tensors, None)
            self.tensors[index] = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            self.outputs[index] = []

        return hook

    def _put_out(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            ours = threading.get_ident() == self._thread
            if ours and self.outputs_too and isinstance(output, Tensor) and output.ndim in (3, 4):
                self.outputs.setdefault(index, []).append(output)

        return hook


def ropes_of(model: nn.Module) -> list[Rope]:
    """Return every set of frequencies that the model holds, in the pairing of Llama.

    transformers calls them `inv_freq` and `attention_scaling`, with a prefix where kinds of layers differ.
    """
    ropes = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1:
                scaling = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
                with contextlib.suppress(ValueError):  # frequencies that no rope has are none that a layer applies
                    # Cloned: models whose frequencies follow the length overwrite the buffer.
                    ropes.append(Rope(buffer.detach().float().clone(), float(scaling)))
    return ropes


def applied(rope: Rope, embeddings: tuple[Tensor, Tensor], positions: Tensor) -> bool:
    """Whether `cos, sin` `[1,n,R or R/2]`, as a layer was given them for `positions` `[n]`, are those of `rope`.

    Layers whose index turns stored keys itself are given those of all tokens, of which the last are looked at.
    """
    half = rope.rotated // 2
    for given, ours in zip(embeddings, rope.cos_sin(positions, embeddings[0].device), strict=True):
        if given.ndim != 3 or given.shape[0] != 1 or given.shape[-1] not in (half, 2 * half):
            return False
        given = given[:, -len(positions) :]
        # A model repeats the R/2 columns behind each other or each one twice; some do not repeat them.
        layouts = (given[0],) if given.shape[-1] == half else (given[0, :, :half], given[0, :, ::2])
        ours = ours * rope.scaling
        bound = 2 * torch.finfo(given.dtype).eps * rope.scaling
        if not any((layout.float() - ours).abs().max() <= bound for layout in layouts):
            return False
    return True


def find(
    ropes: Sequence[Rope],
    embeddings: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    query: Tensor,
    keys: Tensor,
    outputs: Sequence[Tensor],
) -> Rope:
    """Return the rope of a layer, found from its first rows.

    Args:
        ropes: what `ropes_of` found.
        embeddings: the `cos, sin` given to the layer, or None.
        positions: `[n]`.
        query: `[HG,n,D]` as attention received them.
        keys: `[H,n,D]` likewise.
        outputs: outputs of the layer's own submodules (projections, norms) for these rows.

    Raises:
        NoRope: no rope fits.
    """
    if embeddings is None:
        raise NoRope("the layer is given no rotary embedding")
    rope = next((rope for rope in ropes if applied(rope, embeddings, positions)), None)
    if rope is None:
        raise NoRope("the rotary embedding given to the layer is not that of any inv_freq in the model")
    if rope.rotated > keys.shape[-1]:
        raise NoRope(f"the rotary embedding has {rope.rotated} dimensions and the keys {keys.shape[-1]}")
    if not positions.any():
        raise NoRope("one token at position 0 does not tell how a layer rotates")
    before = [list(_as_rows(outputs, x)) for x in (query, keys)]
    if not all(before):
        raise NoRope("no submodule of the layer puts out queries and keys before RoPE, so that it cannot be verified")
    if all(_among(x, rows) for x, rows in zip((query, keys), before, strict=True)):
        raise NoRope("the layer applies no RoPE: its keys are what its projection puts out")
    for pairing in (rope, Rope(rope.inv_freq, rope.scaling, interleaved=True)):
        if all(_among(pairing.unrotate(x, positions), rows) for x, rows in zip((query, keys), before, strict=True)):
            return pairing
    raise NoRope("turned back by the model's inv_freq, in either pairing, keys are not what their projection puts out")


def _as_rows(outputs: Sequence[Tensor], like: Tensor) -> Iterator[Tensor]:
    """Yield every way to read a submodule's output as rows of `like` `[heads,n,D]`, fused projections included."""
    heads, n, size = like.shape
    for output in outputs:
        if output.shape[0] != 1 or output.numel() < like.numel() or output.numel() % (n * size):
            continue
        if output.shape[1:] == like.shape:
            yield output[0]
        if output.shape[1] == n:
            rows = output.reshape(n, -1, size).transpose(0, 1)  # [any number of heads,n,D]
            for first in range(len(rows) - heads + 1):
                yield rows[first : first + heads]
            if len(rows) == 3 * heads:  # query, key, value of one head behind each other, as in GPT-NeoX
                for first in range(3):
                    yield rows[first::3]


def _among(x: Tensor, candidates: Sequence[Tensor]) -> bool:
    """Whether a candidate equals `x` up to roundings of its dtype (cos, two products, a sum: a few of them)."""
    bound = 8 * torch.finfo(x.dtype).eps
    x = x.float()
    return any((x - other.to(x.device).float()).norm() <= bound * other.float().norm() for other in candidates)
