"""Which new tokens of a step decode sparsely, each over its own rows: one of a request, or several that verify a draft.

A step that verifies a draft of n tokens (speculative decoding, https://arxiv.org/abs/2211.17192) holds the n + 1 last
rows of a request. Each of its tokens is served as if the rows behind it were not there, so that it gets what it would
get if it were decoded alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class StepTokens:
    """New tokens of a step that decode sparsely, in order.

    Args:
        tokens: `[n]` int64, their rows of the query.
        rows: `[n]` int32, rows that each may read, its own among them.
        requests: `[n]` int64, whose they are.
        whole: `[R]` bool, requests of which every new token is here.
    """

    tokens: Any
    rows: Any
    requests: Any
    whole: Any

    @property
    def every(self) -> bool:
        """Whether these are all new tokens of the step."""
        return bool(self.whole.all())


def sparse_tokens(
    starts: Any, rows: Any, prefilling: Any | None, above: int, verified: int, dense: Any | None = None
) -> StepTokens | None:
    """Find them; None where there are none.

    Args:
        starts: `[R+1]` int32 of numpy, where each request's new tokens begin.
        rows: `[R]` int32 of numpy, rows of each request, the new ones among them.
        prefilling: `[R]` bool, which are within their prompts: a prompt's last token that comes alone is no decoding.
            None: this engine does not say, and a request with several new tokens counts as a prompt.
        above: a token that may read so many rows or fewer stays dense.
        verified: new tokens that a request decodes in a step, at most.
        dense: `[R]` bool, requests that ask for dense decoding; None: there are none.
    """
    new = starts[1:] - starts[:-1]
    most = verified if prefilling is not None else 1
    ours = (new >= 1) & (new <= most) & (rows > above)
    if prefilling is not None:
        ours &= ~prefilling
    if dense is not None:
        ours &= ~dense
    (which,) = ours.nonzero()
    if not len(which):
        return None
    if (new[which] == 1).all():
        return StepTokens(starts[:-1][which].astype(np.int64), rows[which], which, ours)
    requests = which.repeat(new[which])
    tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in which]).astype(np.int64)
    own = (rows[requests] - (starts[requests + 1] - 1 - tokens)).astype(np.int32)
    sparse = own > above
    whole = ours & (rows - new >= above)
    return StepTokens(tokens[sparse], own[sparse], requests[sparse], whole)
