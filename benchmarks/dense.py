"""Dense attention of one query per head, every way there is here: what a sparse step has to beat.

Each way takes a query `[B,H,G,D]` and reads all keys and values `[B,H,N,D]`, bound beforehand, as they lie. A way that
cannot run here is listed with its reason, never replaced by another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend.dispatch import attend

Way: TypeAlias = Callable[[Tensor], Tensor]

OURS = "attend-all"  # this package's kernel over every row; shown, and never the dense that others are compared with
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
PAGE = 16  # rows, of FlashInfer's store
WORKSPACE = 256 << 20  # bytes, of FlashInfer
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def ways(query: Tensor, keys: Tensor, values: Tensor, impl: str | None = None) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that run here, and the others with the reason.

    A way whose output is further than rounding from float64's is not one: it is among the others.

    Args:
        query: `[B,H,G,D]`, an example.
        keys, values: `[B,H,N,D]`; torch's products of 16 bits are six times slower where heads lie apart.
        impl: of `attend`, for this package's own.
    """
    run: dict[str, Way] = {}
    absent: dict[str, str] = {}
    expected = _specification(query, keys, values)
    for name, make in _known(query, impl).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says there why a backend refuses, and raises as well
                way = make(query, keys, values)
                out = way(query)
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            absent[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            continue
        wrong = float((out.double() - expected).norm() / expected.norm())
        if not wrong < TOLERANCE[query.dtype]:
            absent[name] = f"its output is off by {wrong:.2g}"
        else:
            run[name] = way
    return run, absent


def _specification(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The output `[B,H,G,D]` in float64, head by head, so that no second copy of all keys is made."""
    out = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    for b, h in ((b, h) for b in range(query.shape[0]) for h in range(query.shape[1])):
        logits = query[b, h].double() @ keys[b, h].double().T / query.shape[-1] ** 0.5
        out[b, h] = logits.softmax(-1) @ values[b, h].double()
    return out


def _known(query: Tensor, impl: str | None) -> dict[str, Callable[[Tensor, Tensor, Tensor], Way]]:
    known: dict[str, Callable[[Tensor, Tensor, Tensor], Way]] = {
        "sdpa": _folded,
        "sdpa-gqa": _gqa,
        "sdpa-repeat": _repeated,
        "matmul": _matmul,
        "bmm": _bmm,
        "bmm-keys-first": _keys_first,
    }
    if query.is_cuda:
        for name, backend in BACKENDS.items():
            known[name] = _with_backend(backend, _folded)
            known[f"{name}-gqa"] = _with_backend(backend, _gqa)
        known["flashinfer"] = _flashinfer
        known["flash-attn"] = _flash_attn
    known[OURS] = lambda query, keys, values: _ours(query, keys, values, impl)
    return known


def _folded(_: Tensor, keys: Tensor, values: Tensor) -> Way:
    """The group as the query axis: all query heads of a KV head see the same rows."""
    return lambda query: sdpa(query, keys, values)


def _gqa(_: Tensor, keys: Tensor, values: Tensor) -> Way:
    def run(query: Tensor) -> Tensor:
        return sdpa(query.flatten(1, 2)[:, :, None], keys, values, enable_gqa=True).view(query.shape)

    return run


def _repeated(query: Tensor, keys: Tensor, values: Tensor) -> Way:
    """Keys and values repeated for every query head in the step, as transformers does."""
    group = query.shape[2]
    needed = 2 * group * keys.nbytes
    free = torch.cuda.mem_get_info(query.device)[0] if query.is_cuda else _free()
    if needed > free // 8:
        raise ValueError(f"the copies take {needed / 2**30:.1f} GiB of {free / 2**30:.1f} free")

    def run(query: Tensor) -> Tensor:
        many_keys, many_values = (x.repeat_interleave(group, 1) for x in (keys, values))
        return sdpa(query.flatten(1, 2)[:, :, None], many_keys, many_values).view(query.shape)

    return run


def _free() -> int:
    """Bytes of host memory that may still be taken."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _matmul(_: Tensor, keys: Tensor, values: Tensor) -> Way:
    return lambda query: torch.softmax(query @ keys.mT * query.shape[-1] ** -0.5, -1) @ values


def _bmm(_: Tensor, keys: Tensor, values: Tensor) -> Way:
    many_keys, many_values = keys.flatten(0, 1), values.flatten(0, 1)  # views: B = 1 or nothing between heads

    def run(query: Tensor) -> Tensor:
        logits = torch.bmm(query.flatten(0, 1) * query.shape[-1] ** -0.5, many_keys.mT)
        return torch.bmm(torch.softmax(logits, -1), many_values).view(query.shape)

    return run


def _keys_first(_: Tensor, keys: Tensor, values: Tensor) -> Way:
    """The products the other way round, keys by query."""
    many_keys, many_values = keys.flatten(0, 1), values.flatten(0, 1)

    def run(query: Tensor) -> Tensor:
        logits = torch.bmm(many_keys, query.flatten(0, 1).mT * query.shape[-1] ** -0.5)
        return torch.bmm(torch.softmax(logits, 1).mT, many_values).view(query.shape)

    return run


def _with_backend(name: str, made: Callable[[Tensor, Tensor, Tensor], Way]) -> Callable[[Tensor, Tensor, Tensor], Way]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def make(query: Tensor, keys: Tensor, values: Tensor) -> Way:
        way = made(query, keys, values)

        def run(query: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return way(query)

        return run

    return make


def _flashinfer(query: Tensor, keys: Tensor, values: Tensor) -> Way:
    """FlashInfer's decode over a paged store, https://docs.flashinfer.ai/api/attention.html, which is a copy."""
    import flashinfer  # type: ignore[import-not-found]

    batch, heads, rows, size = keys.shape
    if rows % PAGE:
        raise ValueError(f"pages of {PAGE} rows do not fill {rows}")
    store = tuple(x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1).contiguous() for x in (keys, values))
    pages = rows // PAGE
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=query.device), "HND", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=query.device) * pages,
        torch.arange(batch * pages, dtype=torch.int32, device=query.device),
        torch.full((batch,), PAGE, dtype=torch.int32, device=query.device),
        heads * query.shape[2],
        heads,
        size,
        PAGE,
        q_data_type=query.dtype,
        kv_data_type=keys.dtype,
    )
    return lambda query: wrapper.run(query.flatten(1, 2), store).view(query.shape)


def _flash_attn(query: Tensor, keys: Tensor, values: Tensor) -> Way:
    """FlashAttention's decode, version 3 where it is installed, https://github.com/Dao-AILab/flash-attention."""
    run: Any
    try:
        from flash_attn_interface import flash_attn_with_kvcache as run  # type: ignore[import-not-found, no-redef]
    except ImportError:
        from flash_attn import flash_attn_with_kvcache as run  # type: ignore[import-not-found, no-redef]
    by_row = [x.transpose(1, 2) for x in (keys, values)]  # [B,N,H,D], views
    lengths = torch.full((len(keys),), keys.shape[2], dtype=torch.int32, device=query.device)

    def way(query: Tensor) -> Tensor:
        out: Tensor = run(query.flatten(1, 2)[:, None], *by_row, cache_seqlens=lengths)
        return out.view(query.shape)

    return way


def _ours(query: Tensor, keys: Tensor, values: Tensor, impl: str | None) -> Way:
    nothing = Selection.none(query.shape[0], query.shape[1], query.device)
    everything = Bounds.of(query.shape[0], keys.shape[2], sink=keys.shape[2], device=query.device)
    return lambda query: attend(query, keys, values, nothing, everything, impl=impl)[0]
