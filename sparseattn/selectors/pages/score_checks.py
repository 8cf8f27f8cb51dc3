"""Whether scores of pages have the shape that a choice takes."""

from __future__ import annotations

from torch import Tensor


def check_scores(method: str, scores: Tensor, query: Tensor, pages: int) -> Tensor:
    """Return `scores`, of which the shape alone is looked at.

    Args:
        method: the class whose they are, for the sentence.
        scores: what it returned for `query` `[B,H,G,D]` and so many pages.

    Raises:
        ValueError: they are not `[B,Hs,P]`.
    """
    batch, heads, group, _ = query.shape
    if tuple(scores.shape) not in ((batch, heads, pages), (batch, heads * group, pages)):
        raise ValueError(
            f"scores of {method} returned {list(scores.shape)} for a query [B,H,G,D] = {list(query.shape)} and {pages} "
            f"pages: it must be [B,Hs,P] with B = {batch}, P = {pages} and Hs = {heads} (per KV head) or "
            f"{heads * group} (per query head). vote(found, self.group) makes it of [B,H,G,P]"
        )
    return scores
