"""Exact nearest keys by inner product, in blocks: faiss for tensors in host memory, torch on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

BLOCK = 2**27  # products held at once on a GPU, 512 MiB


def load_faiss() -> Any:
    """Return the faiss module; ImportError with the remedy where it is missing."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "exact nearest keys, the indexes Flat, IVF and HNSW and PQ's codebooks are faiss's, which is missing: "
            "pip install 'sparseattn[faiss]' (or 'sparseattn[faiss-gpu]')"
        ) from error
    return faiss


def in_threads(build: Callable[[Item], None], items: Iterable[Item]) -> None:
    """`build` of each item, side by side, each by one thread: what faiss builds then depends on the item alone."""
    faiss = load_faiss()
    single = {"initializer": faiss.omp_set_num_threads, "initargs": (1,)}  # OpenMP keeps it for each thread
    with ThreadPoolExecutor(faiss.omp_get_max_threads(), **single) as threads:
        list(threads.map(build, items))


@functools.lru_cache(maxsize=1)
def _gpu() -> Any:
    return load_faiss().StandardGpuResources()


def nearest(queries: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` keys with the largest inner products, best first.

    In host memory faiss searches, on the GPU if it was built for one and finds one; tensors on a GPU stay there.

    Args:
        queries: `[Q,D]` float32.
        keys: `[N,D]` float32.
        count: 1 or more; where it is more than N, N.

    Returns:
        products `[Q,count]` float32 and ids `[Q,count]` int32.
    """
    count = min(count, len(keys))
    if queries.is_cuda:
        blocks = [(block @ keys.T).topk(count) for block in queries.split(max(1, BLOCK // len(keys)))]
        return torch.cat([block.values for block in blocks]), torch.cat([block.indices for block in blocks]).int()
    faiss = load_faiss()
    query_rows, key_rows = queries.contiguous().numpy(), keys.contiguous().numpy()
    metric = faiss.METRIC_INNER_PRODUCT
    if hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus():
        products, ids = faiss.knn_gpu(_gpu(), query_rows, key_rows, count, metric=metric)
    else:
        products, ids = faiss.knn(query_rows, key_rows, count, metric=metric)
    return torch.from_numpy(products), torch.from_numpy(ids).int()


def root_of_moment(vectors: Tensor) -> Tensor:
    """`[D,D]` float32: R, the symmetric root of the second moment of `vectors` `[n,D]`.

    `|R (a - b)|` is then the root mean square difference of the products of a and b with the vectors.
    """
    wide = vectors.double()
    values, basis = torch.linalg.eigh(wide.T @ wide / len(vectors))
    return ((basis * values.clamp(min=0).sqrt()) @ basis.T).float()


def evenly(vectors: Tensor, count: int) -> Tensor:
    """At most `count` of `vectors` `[n,D]`, evenly spaced."""
    if len(vectors) <= count:
        return vectors
    return vectors[torch.linspace(0, len(vectors) - 1, count, device=vectors.device).long()]
