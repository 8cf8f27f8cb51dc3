"""16 rows with 16 queries: what products by matrix tiles and by pairs share."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_vectors import FLOATS, LANES, WORDS, place_in, splat

LINE = 2 * LANES  # numbers of 16 bits of a register
ROWS = 4 * LINE  # whose logits are known before their values are read


@intrinsic
def copied_line(typing, array, at, source, place):
    """Copy 32 numbers of 16 bits from `source[place:]` to `array[at:]`."""

    def code(context, builder, signature, arguments):
        array_, at_, source_, place_ = arguments
        line = ir.VectorType(ir.IntType(16), LINE)
        x = builder.load(place_in(context, builder, source, source_, place_, line), align=2)
        builder.store(x, place_in(context, builder, array, array_, at_, line), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, source, types.intp), code


@njit
def adjacent(at, first, stop):
    """Return whether rows lie one after the other, all as far apart."""
    step, same = at[first + 1] - at[first], True
    for r in range(first + 1, stop):
        same = same and at[r] - at[r - 1] == step
    return same


@intrinsic
def turned(typing, sums, first, out, at, step, scale):
    """Put 16 rows of 16 numbers from `sums[first:]` on, times `scale`, at `out[at:]` as columns, `step` apart."""

    def code(context, builder, signature, arguments):
        sums_, first_, out_, at_, step_, scale_ = arguments
        lines = []
        for row in range(LANES):
            place = builder.add(first_, ir.Constant(at_.type, row * LANES))
            lines.append(builder.load(place_in(context, builder, sums, sums_, place, FLOATS), align=4))
        for bit in (1, 2, 4, 8):  # numbers change places with those across the diagonal, in ever larger squares
            upper = [lane if not lane & bit else LANES + lane - bit for lane in range(LANES)]
            lower = [lane + bit if not lane & bit else LANES + lane for lane in range(LANES)]
            for row in (row for row in range(LANES) if not row & bit):
                pair = lines[row], lines[row | bit]
                lines[row], lines[row | bit] = (
                    builder.shuffle_vector(*pair, ir.Constant(WORDS, lanes)) for lanes in (upper, lower)
                )
        factor = splat(builder, scale_, FLOATS)
        for column, line in enumerate(lines):
            place = builder.add(at_, builder.mul(step_, ir.Constant(at_.type, column)))
            to = place_in(context, builder, out, out_, place, FLOATS)
            builder.store(builder.fmul(line, factor), to, align=4)
        return context.get_dummy_value()

    return types.void(sums, types.intp, out, types.intp, types.intp, types.float32), code
