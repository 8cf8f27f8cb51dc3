"""RobustVamana: what its graph links, with queries and without."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("faiss")
pytest.importorskip("numba")

import numpy as np

from sparseattn import KVCache, RobustVamana, make_selector
from sparseattn.kernels.graph import build_and_search


def apart(rows: int = 600, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in many small clusters, and queries each of which has its largest products in several of them."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(60, size, generator=draw), dim=1)
    keys = centres.repeat_interleave(rows // 60, 0) + 0.05 * torch.randn(rows, size, generator=draw)
    queries = centres[torch.randint(60, (rows, 3), generator=draw)].sum(1) * 3
    return queries[torch.randperm(rows, generator=draw)], keys[torch.randperm(rows, generator=draw)]


def built(queries: torch.Tensor, keys: torch.Tensor, **arguments: float) -> tuple[KVCache, RobustVamana]:
    selector = RobustVamana(**arguments)  # type: ignore[arg-type]
    cache = KVCache(selector, sink=0, window=0, seal=1)
    cache.append(keys[None, None], keys[None, None], queries[None, None, None])
    cache.seal()
    return cache, selector


def test_a_query_gives_its_place_to_keys_of_its_list() -> None:
    adjacency = np.array([[1, 4, -1, -1], [0, 5, 4, 2], [3, -1, -1, -1], [2, 1, 0, 5], [0, 1, 2, 3], [3, 1, 2, -1]])
    stitched = build_and_search.stitch(adjacency.astype(np.int32), 4, 2)  # 4 and 5 are queries
    # Key 0 has three places for query 4, of whose list 1 is there; key 1 one for each of two.
    assert stitched.tolist() == [[1, 2, 3, -1], [0, 2, 3, -1], [3, -1, -1, -1], [2, 1, 0, -1]]


def test_queries_of_the_prompt_lead_later_ones_to_more_at_the_same_beam() -> None:
    queries, keys = apart()
    asked = apart()[0][:100]
    found = []
    for share in (0.0, 0.5):
        cache, _ = built(queries, keys, beam=10, degree=8, build_beam=16, share=share)
        truth = (asked @ keys.T).topk(10).indices
        masks = torch.stack([cache.select(one[None, None, None], 10).mask(600)[0, 0] for one in asked])
        found.append(masks.gather(1, truth).double().mean().item())
    assert found[1] > found[0] + 0.05


def test_a_larger_alpha_takes_more_neighbours() -> None:
    queries, keys = apart()
    degrees = [
        (built(queries, keys, alpha=alpha, share=0.0)[1].adjacency.data >= 0).sum(-1).double().mean()
        for alpha in (1.0, 1.5)
    ]
    assert degrees[1] > degrees[0]


def test_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"alpha is 1 or more, got 0.5"):
        make_selector("robustvamana:alpha=0.5")
    with pytest.raises(ValueError, match="robustvamana has no argument 'pivots'"):
        make_selector("robustvamana:pivots=4")
