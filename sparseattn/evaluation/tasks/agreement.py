"""How near a method's predictions of a text come to full attention's, which needs no model that answers anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

AGREEMENT = "agreement"  # the task's name


def agreement(logits: Tensor, dense: Tensor, expected: Sequence[int]) -> dict[str, Any]:
    """Means over n tokens of a text, in nats, for a record.

    Args:
        logits: `[n,V]` of a method, behind each token that was fed.
        dense: `[n,V]` of full attention, likewise.
        expected: the n tokens that follow in the text.

    Returns:
        `kl`, the Kullback-Leibler divergence KL(dense || method) of the next-token distributions; `same_top`, the share
        of tokens whose likeliest next token is the same; `nll`, the method's negative log-likelihood of the text, and
        `nll_difference`, by how much it is above full attention's; `scored_tokens`, which is n.
    """
    kl = same = nll = full_nll = 0.0
    for row, full_row, token in zip(logits, dense, expected, strict=True):  # a row may hold 262,144 numbers
        log, full = row.double().log_softmax(-1), full_row.double().log_softmax(-1)
        kl += float((full.exp() * (full - log)).sum())
        same += float(row.argmax() == full_row.argmax())
        nll -= float(log[token])
        full_nll -= float(full[token])
    n = len(expected)
    return {
        "kl": max(kl / n, 0.0),  # rounding may leave less than nothing
        "same_top": same / n,
        "nll": nll / n,
        "nll_difference": (nll - full_nll) / n,
        "scored_tokens": n,
    }
