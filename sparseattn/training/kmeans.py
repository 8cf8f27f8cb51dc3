"""Buckets of keys, by faiss's spherical k-means; Saap, https://arxiv.org/abs/2502.08246, sections 3.3 and 4.1.

Letters: n keys, T keys of a prompt, D head size, C clusters (buckets).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.training.recipe import TrainingError

BLOCK = 2**20  # scores held at once on a CPU, 4 MiB in float32
ROUNDS = 10  # of repair; each splits as many of the largest clusters as there are empty ones


@dataclass(frozen=True)
class Balance:
    """How a set of keys is spread over C clusters.

    Attributes:
        inertia: mean squared distance of a key of length one to its centroid, 2 - 2 cos.
        imbalance: C * sum p^2, by how much a key's own bucket is larger than the mean one; 1 is even.
        largest: share of the keys in the largest bucket.
        empty: buckets without a key.
    """

    inertia: float
    imbalance: float
    largest: float
    empty: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def balance(keys: Tensor, centroids: Tensor) -> Balance:
    """Return the balance of keys `[n,D]` over the clusters of centroids `[C,D]`."""
    keys = unit(keys)
    member = assign(keys, centroids)
    share = torch.bincount(member, minlength=len(centroids)).double() / len(keys)
    cos = (keys * centroids[member]).sum(-1).double()
    return Balance(
        inertia=float((2 - 2 * cos).mean()),
        imbalance=float(len(centroids) * share.square().sum()),
        largest=float(share.max()),
        empty=int((share == 0).sum()),
    )


def spherical_kmeans(keys: Tensor, clusters: int, *, iterations: int = 25, seed: int = 0) -> Tensor:
    """Return centroids `[C,D]` float32 of length one, of the directions of keys `[n,D]`.

    faiss trains on the GPU if it was built for one and the keys are on it. Clusters left empty take the worst placed
    keys of the largest ones, unless there are fewer different keys than clusters.

    Raises:
        TrainingError: more clusters than keys.
        ImportError: faiss is missing.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "the k-means of training is faiss's, which is not installed: pip install 'sparseattn[faiss]' (or "
            "'sparseattn[faiss-gpu]')"
        ) from error
    if clusters < 1 or iterations < 1:
        raise TrainingError(f"k-means takes at least 1 cluster and 1 iteration, got {clusters} and {iterations}")
    if clusters > len(keys):
        raise TrainingError(f"{clusters} clusters are more than the {len(keys)} keys to find them in")
    keys = unit(keys)
    on_gpu = keys.is_cuda and hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus() > 0
    trainer = faiss.Kmeans(
        keys.shape[1],
        clusters,
        niter=iterations,
        spherical=True,
        seed=seed,
        gpu=on_gpu,
        min_points_per_centroid=1,  # fewer than faiss's 39 are no reason for a warning
        max_points_per_centroid=len(keys),  # the sample is bounded already
    )
    trainer.train(keys.cpu().contiguous().numpy())
    centroids = unit(torch.from_numpy(trainer.centroids).to(keys.device))
    return repaired(keys, centroids)


def repaired(keys: Tensor, centroids: Tensor) -> Tensor:
    """Return centroids `[C,D]` without empty clusters for keys `[n,D]` of length one, as far as keys differ."""
    centroids = centroids.clone()
    for _ in range(ROUNDS):
        member = assign(keys, centroids)
        sizes = torch.bincount(member, minlength=len(centroids))
        empty = (sizes == 0).nonzero().flatten()
        if not len(empty):
            break
        distance = 1 - (keys * centroids[member]).sum(-1)
        for free, full in zip(empty.tolist(), sizes.argsort(descending=True, stable=True).tolist(), strict=False):
            own = member == full
            if int(sizes[full]) > 1:
                centroids[free] = keys[distance.masked_fill(~own, -1).argmax()]
    return centroids


def assign(inputs: Tensor, centroids: Tensor) -> Tensor:
    """Return the bucket of each key of `[T,D]` as `[T]` int64, computed in blocks."""
    blocks = inputs.split(at_once(inputs.device, len(centroids)))
    return torch.cat([(block @ centroids.T).argmax(-1) for block in blocks])


def mean_lengths(keys: Tensor, centroids: Tensor) -> Tensor:
    """Return `[C]`, the mean length of the keys `[n,D]` of each bucket; of all keys for an empty one."""
    member, length = assign(keys, centroids), keys.norm(dim=-1)
    total, count = (
        length.new_zeros(len(centroids)).index_add_(0, member, x) for x in (length, torch.ones_like(length))
    )
    return torch.where(count > 0, total / count.clamp(min=1), length.mean())


def by_bucket(weights: Tensor, assigned: Tensor, buckets: int) -> Tensor:
    """Return `[..,C]`, the sums of `[..,T]` over the keys of each bucket."""
    if weights.device.type == "cpu":  # eight times as fast as the product
        return weights.new_zeros(*weights.shape[:-1], buckets).index_add_(-1, assigned, weights)
    return weights @ F.one_hot(assigned, buckets).float()  # GPUs add in any order, so that a resumed run would differ


def at_once(device: torch.device, tokens: int) -> int:
    """Return the queries whose scores are computed at once: on a CPU as many as the caches hold, three times the speed
    at 8k.

    But at least 32, for the sake of the product: 1.2 ms a query at 100k tokens and D = 128, against 2.3 ms with 10.
    """
    return max(32, (BLOCK if device.type == "cpu" else 64 * BLOCK) // tokens)


def unit(vectors: Tensor) -> Tensor:
    """Return vectors `[..,D]` scaled to length one."""
    return F.normalize(vectors, dim=-1)
