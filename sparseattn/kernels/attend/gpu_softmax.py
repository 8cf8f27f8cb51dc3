"""The online softmax of Triton kernels: one step, used by every loop, and its end."""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_step(logits, peak, total):
    """One step of the online softmax: a tile of base-2 logits `[M,BLOCK]` joins the running `peak`, `total` `[M]`.

    Returns the tile's weights `[M,BLOCK]`, the factor `[M]` by which whatever was summed before must shrink, and the
    new peak and total. Where nothing was read yet the peak is -inf, and -inf - -inf would be NaN: hence the anchor.
    """
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - anchor[:, None])
    shrink = tl.exp2(peak - anchor)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def softmax_end(acc, peak, total):
    """Output `[M,D]` and natural-log lse `[M]` of a finished online softmax; 0 and -inf where no row was read."""
    none = total == 0.0
    safe = tl.where(none, 1.0, total)
    lse = tl.where(none, float("-inf"), (peak + tl.log2(safe)) * 0.6931471805599453)  # ln 2
    return acc / safe[:, None], lse
