"""What selectors compute to choose, each in torch, which is the specification, and compiled for CPU and GPU.

`impl=None` takes Triton on a CUDA device that has it, numba's code on the CPU where it is installed, and torch
elsewhere and where torch is as fast; a named one of "torch", "numba" and "triton" runs or raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.dispatch import why_not_numba, why_not_triton

SCORING = {"torch": None, "numba": why_not_numba, "triton": why_not_triton}  # impl -> why it cannot run
GROUPS = ("max", "sum", "softmax", "each")


def chosen(impl: str | None, device: torch.device, dtype: torch.dtype, there: tuple[str, ...] = tuple(SCORING)) -> str:
    """The implementation that `impl` means for tensors of a device and dtype, of those that are `there`.

    Raises:
        ValueError: an `impl` that is not there.
        RuntimeError: a named one that cannot run here.
    """
    if impl is None:
        if device.type == "cuda":
            return "triton" if "triton" in there and why_not_triton(device, dtype) is None else "torch"
        return "numba" if "numba" in there and why_not_numba(device, dtype) is None else "torch"
    if impl not in there:
        raise ValueError(f"impl is one of {', '.join(there)} or None, got {impl!r}")
    why_not = SCORING[impl]
    reason = None if why_not is None else why_not(device, dtype)
    if reason is not None:
        raise RuntimeError(f'impl="{impl}" cannot run: {reason}')
    return impl


def vote(scores: Tensor, group: str, impl: str | None = None) -> Tensor:
    """Turns the scores of G query heads into those of their selection heads.

    Args:
        scores: `[B,H,G,N]`, -inf where a candidate must not be chosen.
        group: "max" or "sum" of the raw scores, "softmax" (logarithm of the sum of the query heads' probabilities): one
            choice per KV head; "each": every query head chooses for itself.
        impl: of "softmax", see the module; "torch" or "numba", which takes float32. The others are torch's.

    Returns:
        `[B,Hs,N]`; Hs is H*G for "each" and H otherwise.
    """
    if group == "each":
        return scores.flatten(1, 2)
    if group == "max":
        return scores.amax(2)
    if group == "sum":
        return scores.sum(2)
    if impl is None and (scores.dtype != torch.float32 or scores.requires_grad):
        impl = "torch"
    if chosen(impl, scores.device, scores.dtype, ("torch", "numba")) == "numba":
        from sparseattn.kernels.attend import cpu as attend_cpu

        return attend_cpu.vote_softmax(scores)
    total = scores.logsumexp(-1, keepdim=True)  # log of the summed probabilities, so that small ones still rank
    return (scores - torch.where(total.isinf(), 0.0, total)).logsumexp(2)


def best(scores: Tensor, count: int) -> Tensor:
    """`[B,Hs,S]` int64: the `count` highest of `[B,Hs,N]`, best first; -1 in place of a score of -inf. S <= N."""
    top = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return torch.where(top.values.isneginf(), -1, top.indices)


def best_rows(scores: Tensor, count: int, impl: str | None = None) -> Tensor:
    """The candidates with the `count` highest scores, in no order.

    Args:
        scores: `[B,Hs,N]`, -inf for what must not be chosen.
        impl: see the module; "torch", or "numba", which takes float32.

    Returns:
        `[B,Hs,S]` int32, S = min(count, N); -1 where there are fewer. Of candidates with the same score any may be
        chosen.
    """
    if impl is None and (scores.dtype != torch.float32 or scores.requires_grad):
        impl = "torch"
    if chosen(impl, scores.device, scores.dtype, ("torch", "numba")) == "numba":
        from sparseattn.kernels.topk import cpu as topk_cpu

        return topk_cpu.best_rows(scores, count)
    top = scores.topk(min(count, scores.shape[-1]), dim=-1, sorted=False)
    return torch.where(top.values.isneginf(), -1, top.indices).int()


# -- pages -----------------------------------------------------------------------------------------------------------


def page_bounds(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`[B,H,G,P]`: an upper bound of `q . k` over the keys of each page, for a query `[B,H,G,D]`.

    `low` and `high` `[B,H,P,D]` are the least and the largest of the page's keys in every channel.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide)
    # max(q M, q m) is q M where q >= 0 and q m elsewhere, because m <= M: two matrix products.
    return q.clamp(min=0) @ high.to(wide).mT + q.clamp(max=0) @ low.to(wide).mT


def page_scores(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    real: Tensor,
    group: str,
    step: Tensor | None = None,
    impl: str | None = None,
    temperature: float | None = None,
) -> Tensor:
    """Quest's scores of pages, the group's vote included: `page_bounds / temperature`, then `vote`.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        low, high: `[B,H,P,D]` bounds of each page, of the query's dtype, or int8 with a `step`; anything where a page
            is not real.
        real: `[B,P]` bool.
        group: see `vote`.
        step: `[B,H,D]` float32, what 1 of a channel of int8 bounds stands for.
        impl: see the module.
        temperature: what bounds are divided by, see `Selector.temperature`; None: `sqrt(D)`.

    Returns:
        `[B,Hs,P]` float32 (float64 for float64), -inf where a page is not real.
    """
    impl = chosen(impl, query.device, query.dtype)
    temperature = temperature or query.shape[-1] ** 0.5
    if impl == "triton":
        from sparseattn.kernels.page_bounds import gpu as page_bounds_gpu

        return page_bounds_gpu.scores(query, low, high, real, group, step, temperature)
    if step is not None:
        query = query.to(torch.promote_types(query.dtype, torch.float32)) * step[:, :, None]
    if impl == "numba":
        from sparseattn.kernels.attend import cpu as attend_cpu

        each = "each" if group == "softmax" else group
        scores = attend_cpu.page_scores(query, low, high, real, each, temperature)
        return vote(scores.unflatten(1, query.shape[1:3]), group, impl) if group == "softmax" else scores
    bound = page_bounds(query, low, high) / temperature
    return vote(bound.masked_fill(~real[:, None, None], -torch.inf), group, impl)


def page_scores_at(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    table: Tensor,
    group: str,
    impl: str | None = None,
    temperature: float | None = None,
) -> Tensor:
    """`page_scores` where the bounds of all sequences' pages lie in one store, as a serving engine's blocks do.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        low, high: `[pages,H,D]` of the query's dtype.
        table: `[B,P]` int32, which page of the store is a sequence's; negative: none.
        group: see `vote`.
        impl: see the module.
        temperature: see `page_scores`.

    Returns:
        `[B,Hs,P]` float32, -inf where the table names none.
    """
    impl = chosen(impl, query.device, query.dtype)
    temperature = temperature or query.shape[-1] ** 0.5
    if impl == "numba":
        from sparseattn.kernels.attend import cpu as attend_cpu

        each = "each" if group == "softmax" else group
        scores = attend_cpu.page_scores_at(query, low, high, table, each, temperature)
        return vote(scores.unflatten(1, query.shape[1:3]), group, impl) if group == "softmax" else scores
    if impl == "triton":
        from sparseattn.kernels.page_bounds import gpu as page_bounds_gpu

        return page_bounds_gpu.scores_at(query, low, high, table, group, temperature)
    place = table.long().clamp(min=0)
    low, high = (held[place].transpose(1, 2) for held in (low, high))  # [B,H,P,D]
    return page_scores(query, low, high, table >= 0, group, impl=impl, temperature=temperature)


def best_pages(scores: Tensor, count: int, page: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """The pages with the `count` highest scores, in no order.

    Args:
        scores: `[B,Hs,P]`, -inf for a page that must not be chosen.
        page: rows of a page.
        impl: see the module; "torch" or "triton".

    Returns:
        start, length `[B,Hs,S]` int32 of their rows, S = min(count, P); length 0 where there are fewer pages. Of pages
        with the same score any may be chosen.
    """
    if chosen(impl, scores.device, scores.dtype, ("torch", "triton")) == "triton":
        from sparseattn.kernels.page_bounds import gpu as page_bounds_gpu

        return page_bounds_gpu.best(scores, count, page)
    top = scores.topk(min(count, scores.shape[-1]), dim=-1, sorted=False)
    return (top.indices * page).int(), top.values.ne(-torch.inf).int() * page


# -- buckets ---------------------------------------------------------------------------------------------------------

# Bytes of a weight -> vectors up to which reading the weights is what a linear layer costs. More of them torch
# multiplies faster, once it has turned weights of 16 bits into float32 ones.
FEW = {2: 64, 4: 16}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False, impl: str | None = None
) -> Tensor:
    """A linear layer for each of A heads: `x @ weight.mT + bias`, summed in float32.

    Args:
        x: `[A,n,D]` float32.
        weight: `[A,C,D]`, float32 or of 16 bits.
        bias: `[A,C]` float32, or None.
        relu: whether negative outputs become 0.
        impl: see the module; "torch" or "numba".

    Returns:
        `[A,n,C]` float32.
    """
    if impl is None and (x.shape[1] > FEW[weight.itemsize] or x.is_cuda or x.requires_grad or weight.requires_grad):
        impl = "torch"
    if bias is None:
        bias = weight.new_zeros(weight.shape[:2], dtype=torch.float32)
    if chosen(impl, x.device, weight.dtype, ("torch", "numba")) == "numba":
        from sparseattn.kernels.attend import cpu as attend_cpu

        return attend_cpu.linear(x, weight, bias, relu)
    out = torch.baddbmm(bias[:, None], x, weight.to(x.dtype).mT)
    return out.relu_() if relu else out


def bucket_spans(
    ids: Tensor, edges: Tensor, span: int, budget: int, slots: int, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """The rows of some buckets, best first, as spans, stopped at `budget` rows.

    Args:
        ids: `[B,Hs,P]` int64, different buckets, Hs a multiple of H.
        edges: `[B,H,R,C+2]` int32: the rows of bucket c in segment r are `edges[c]` to `edges[c + 1]`.
        span: longest span, a power of two.
        budget: rows per selection head. What does not fit in `slots` is left out.
        impl: see the module.

    Returns:
        start, length `[B,Hs,S]` int32, S = `slots`, the oldest rows of a bucket first.
    """
    impl = chosen(impl, ids.device, torch.float32)
    if impl == "triton":
        from sparseattn.kernels.bucket_spans import gpu as bucket_spans_gpu

        return bucket_spans_gpu.spans(ids, edges, span, budget, slots)
    if impl == "numba":
        from sparseattn.kernels.attend import cpu as attend_cpu

        return attend_cpu.bucket_spans(ids, edges, span, budget, slots)
    (batch, named, probed), (heads, segments) = ids.shape, edges.shape[1:3]
    place = ids.reshape(batch, heads, 1, -1).expand(-1, -1, segments, -1)
    start = edges.gather(3, place)  # [B,H,R,each*P]
    length = edges.gather(3, place + 1) - start
    start, length = (  # [B,Hs,P*R], best bucket first, its oldest rows first
        x.unflatten(3, (-1, probed)).permute(0, 1, 3, 4, 2).reshape(batch, named, -1) for x in (start, length)
    )
    found = Selection.runs(start, length, span, min(budget, slots * span))
    fill = max(slots - found.start.shape[2], 0)  # fewer rows than slots: the rest is not used
    return tuple(torch.nn.functional.pad(x[..., :slots], (0, fill)) for x in (found.start, found.length))  # type: ignore[return-value]


# -- lists of keys ---------------------------------------------------------------------------------------------------


def listed_scores(query: Tensor, keys: Tensor, ids: Tensor, impl: str | None = None) -> Tensor:
    """The inner product of each query head with its listed keys, each key once.

    Args:
        query: `[B,H,G,D]`.
        keys: `[B,H,N,D]`, elements of a row adjacent; rows that nobody lists may hold anything.
        ids: `[B,H*G,n]` int32, rising: rows of `keys`, -1 for none.
        impl: see the module.

    Returns:
        `[B,H*G,n]` float32, -inf for -1 and for all but the first of equal ids.
    """
    impl = chosen(impl, query.device, query.dtype)
    if impl == "triton":
        from sparseattn.kernels.listed_scores import gpu as listed_scores_gpu

        return listed_scores_gpu.scores(query, keys, ids)
    if impl == "numba":
        from sparseattn.kernels.attend import cpu as attend_cpu

        return attend_cpu.listed_scores(query, keys, ids)
    batch, named = ids.shape[:2]
    b = torch.arange(batch, device=ids.device)[:, None, None]
    h = (torch.arange(named, device=ids.device) // query.shape[2])[None, :, None]
    rows = keys[b, h, ids.clamp(min=0)].float()  # [B,Hs,n,D]
    scores = (rows @ query.float().reshape(batch, named, -1, 1))[..., 0]
    again = torch.nn.functional.pad(ids[..., 1:] == ids[..., :-1], (1, 0))
    return scores.masked_fill(again | (ids < 0), -torch.inf)
