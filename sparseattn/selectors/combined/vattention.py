"""vAttention: the top rows exactly and a sample of the others, as large as an error bound needs.

https://arxiv.org/abs/2510.05688
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, both, sorted_best
from sparseattn.kernels.random_draws import draws, streams
from sparseattn.selectors.abilities import Biases, Evicts, HasTail, ReadsKeys, WeighsUnsealed
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.combined.wrapper import Wrapper

TINY = 1e-30  # of a denominator of nothing
SIGNLESS = (1 << 63) - 1  # takes the sign from a draw


class VAttention(Biases, WeighsUnsealed, ReadsKeys, Wrapper):
    """Reads what another selector chooses, and of all other rows as many at random as keep the softmax's denominator
    within a relative error epsilon, with probability 1 - delta.

    Rows are drawn evenly, with replacement, for each KV head. The first draws, the base sample, tell how exponentiated
    logits spread: with their standard deviation s (0 for a row that is read anyway), N sealed rows, z the normal
    quantile, and D the denominator that they estimate together with sink, window and the rows chosen, each query head
    takes `(z s N / (epsilon D))^2` draws, at least the base sample. A row drawn c times of n draws gets the bias
    `log(c N / n)`. A head whose bound would take N draws or more reads every row, with no bias, if the budget allows.

    Args:
        inner: who chooses the rows read exactly, a selector or its name, `Exact` by default; none that evicts, biases
            or has a tail.
        epsilon: relative error, above 0.
        delta: probability that it is exceeded, in (0, 1).
        rate: the base sample, a share of the sealed rows; 2 draws at least.
        top: rows that `inner` chooses: a share of the sealed rows (float; of a batch's longest sequence) or their
            number (int), in whole spans of its, and at most half of the budget.
        margin: standard errors of the base sample's variance that are added to it, 0 in the paper: exponentiated logits
            have a long tail, so that a small sample mostly sees too little spread, and without a margin the bound is
            missed more often than delta.
        seed: of the draws, any integer. They depend on layer, head and the query's position, not on the batch.

    The budget caps the rows that are read. **Where it binds the bound is void**: `needed` tells after `select` how many
    draws the bound takes, `[B,H,G]`, and `drawn` how many were made. It is the bound of a normal approximation as well,
    and a base sample may miss the few rows that weigh most. So the share of steps with a larger error is to be measured
    where it matters (`denominator_error` of `evaluate`).

    Departures, from its code as others describe it: the error is two-sided, so z is of delta / 2; draws are of all
    sealed rows, those that are read anyway counting 0, so that the query heads of a KV head share them and read fewer
    rows in all; the base sample is the beginning of the sample, not drawn apart. The paper bounds the numerator too,
    where asked; here the denominator alone.

    `scanned`: what `inner` scored, the rows it chose, the base sample, sink and unsealed rows. `scan_bytes`: as much
    of `inner`, and a key of each of the others.

    Raises:
        ValueError: an argument out of its range, or an inner selector that cannot choose here.
    """

    operators = 200
    knob = "epsilon"

    def __init__(
        self,
        inner: Selector | str = "exact",
        epsilon: float = 0.1,
        delta: float = 0.1,
        rate: float = 0.02,
        top: int | float = 0.02,
        margin: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon is a relative error above 0, got {epsilon}")
        if not 0 < delta < 1:
            raise ValueError(f"delta is a probability between 0 and 1, got {delta}")
        if not 0 < rate <= 1:
            raise ValueError(f"rate is a share of the sealed rows in (0, 1], got {rate}")
        if not (type(top) is int and top >= 1) and not (isinstance(top, float) and 0 < top <= 1):
            raise ValueError(f"top is 1 or more rows (int) or a share of them in (0, 1] (float), got {top!r}")
        if not (math.isfinite(margin) and margin >= 0):
            raise ValueError(f"margin is 0 or more standard errors, got {margin}")
        super().__init__(inner)
        wrong = {
            Evicts: "drops rows",
            Biases: "corrects a sample by a bias",
            HasTail: "stands for what is not read",
        }
        for ability, what in wrong.items():
            if self.inner.find(ability):
                raise ValueError(f"{self.inner} {what}, and here all that it does not choose is sampled: take another")
        if any(isinstance(part, Partitioned) for part in self.inner.tree()):
            raise ValueError(f"{self.inner} stores rows in an order of its own, and a sample is drawn by position")
        self.uses_budget = True  # for the sample, whatever the inner method does
        self.epsilon, self.delta, self.rate, self.top = epsilon, delta, rate, top
        self.margin, self.seed = margin, seed
        self.needed: Tensor | None = None  # of the last `select`, no state
        self.drawn: Tensor | None = None

    def allowed(self, budget: int) -> int:
        return budget

    def fix(self, rows: int, seal: int) -> None:
        raise ValueError(f"{self} draws as many rows as are stored: build the KVCache without fixed=True")

    def append(self, rows: Rows) -> Tensor | None:
        if self.inner.append(rows) is not None:
            raise ValueError(f"{self.inner} stores rows in an order of its own, and a sample is drawn by position")
        return None

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        batch, heads, group, size = query.shape
        real, keys = step.valid, self.stored_keys()
        stored = real.shape[1]
        exact = self._exact(stored, budget)
        chosen = self.inner.counted(self.inner.select(query, step, exact), query, step, exact)
        named = _of_each(chosen.mask(stored), heads, group)  # [B,H,G,N]
        total = real.sum(-1)[:, None, None]  # [B,1,1]
        left = budget - _of_each(chosen.attended[..., None], heads, group)[..., 0]  # [B,H,G]
        slots = min(budget, stored)
        base = (self.rate * total).ceil().long().clamp(min=2, max=slots).minimum(total).expand_as(left)
        place = torch.arange(slots, device=query.device)
        stream = streams(self.seed, self.layer, self.head_numbers(heads), query.device)
        rank = (draws(stream, step.positions, place.expand(batch, -1)) & SIGNLESS) % total.clamp(min=1)
        drawn = _rows(real, rank)  # [B,H,M]
        scaled = query.float() / self.temperature(size)
        first = drawn[..., : min(max(2, math.ceil(self.rate * stored)), slots)]  # [B,H,b]
        logits = (scaled @ _keys(keys, first).float().mT).masked_fill(named.gather(3, _every(first, group)), -torch.inf)
        known = _log_sum(scaled, keys, chosen)
        if step.unsealed_lse is not None:
            known = torch.logaddexp(known, step.unsealed_lse.float())

        self.needed = needed = self._needed(logits, base, known, total)
        whole = (needed >= total) & (total <= budget)
        self.drawn = take = torch.where(whole, total, needed.ceil().clamp(max=budget).long().minimum(left))  # [B,H,G]
        in_order = _rows(real, place.expand(batch, 1, -1))[:, :, None]  # [B,1,1,M]
        rows = torch.where(whole[..., None], in_order, drawn[:, :, None])  # [B,H,G,M]
        in_use = (place < take[..., None]) & (total[..., None] > 0) & ~named.gather(3, rows)
        ids, times = _distinct(torch.where(in_use, rows, stored), stored)
        bias = (times.clamp(min=1) * (total / take.clamp(min=1))[..., None]).log().float()

        start, length = (_of_each(part, heads, group).flatten(1, 2) for part in (chosen.start, chosen.length))
        picked = Selection.tokens(ids.flatten(1, 2))
        return Selection(
            torch.cat([start, picked.start], 2),
            torch.cat([length, picked.length], 2),
            chosen.span,
            *self._costs(chosen, query, base),
            bias=torch.cat([torch.zeros_like(start, dtype=torch.float32), bias.flatten(1, 2)], 2),
        )

    def _exact(self, stored: int, budget: int) -> int:
        """Rows that `inner` is to choose of so many."""
        exact = self.top if isinstance(self.top, int) else math.ceil(self.top * stored)
        return max(min(exact, stored, budget // 2) // self.span * self.span, self.span)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        """Predict a step as if the bound took all of the budget, and query heads chose other rows each."""
        (batch, heads, group, size), rows = query.shape, min(budget, sealed)
        inner = self.inner.full_scan(query, sealed, self._exact(sealed, budget))
        if inner is None:
            return None
        weighed = self._weighed(query, sealed, budget, inner)
        read, keys = weighed * size * self.bytes_of(query), inner.rows + self._base(sealed, rows)
        sampling = (
            Launch("walk", batch * heads * read, entries=batch * heads * group * keys),
            Launch("sort", entries=sorted_best(batch * heads * group, sealed, rows)),
            Launch("operator", count=self.operators),
        )
        expected, launches = both(inner.expected, "the whole budget is read"), (*inner.launches, *sampling)
        scanned = inner.scanned + weighed
        return Scan(scanned, inner.read + read, launches, heads * group, rows, rows, expected=expected)

    def _base(self, sealed: int, rows: int) -> int:
        """Draws of the base sample, of so many sealed rows and at most so many rows read."""
        return min(max(math.ceil(self.rate * sealed), 2), rows)

    def _weighed(self, query: Tensor, sealed: int, budget: int, inner: Scan) -> float:
        """Rows whose keys are read besides what `inner` scans: those it chose, and the base sample."""
        return min(inner.rows * inner.lists / query.shape[1], sealed) + self._base(sealed, min(budget, sealed))

    def _needed(self, logits: Tensor, base: Tensor, known: Tensor, total: Tensor) -> Tensor:
        """`[B,H,G]` float32: draws that the bound takes.

        Args:
            logits: `[B,H,G,b]` of the first draws, -inf for rows that are read anyway.
            base: `[B,H,G]`, how many of them are the base sample.
            known: `[B,H,G]`, log-sum-exp of what is read exactly.
            total: `[B,1,1]`, sealed rows.
        """
        mine = torch.arange(logits.shape[3], device=logits.device) < base[..., None]
        logits = logits.masked_fill(~mine, -torch.inf)
        top = torch.maximum(logits.amax(-1), known)
        sizes = (logits - torch.where(top.isinf(), 0.0, top)[..., None]).exp()
        mean = sizes.sum(-1) / base.clamp(min=1)
        off = (sizes - mean[..., None]).square() * mine
        variance = off.sum(-1) / (base - 1).clamp(min=1)
        own = (off.square().sum(-1) / base.clamp(min=1) - variance.square()).clamp(min=0) / base.clamp(min=1)
        spread = (variance + self.margin * own.sqrt()).sqrt()
        denominator = (known - torch.where(top.isinf(), 0.0, top)).exp() + total * mean
        z = statistics.NormalDist().inv_cdf(1 - self.delta / 2)
        rows = (z * spread * total / (self.epsilon * denominator.clamp(min=TINY))).square()
        return torch.where(base < 2, torch.inf, torch.maximum(rows, base))  # one draw says nothing of their spread

    def _costs(self, chosen: Selection, query: Tensor, base: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return `scanned` `[B,H*G]` and `scan_bytes` `[B,H]`, of a base sample of `base` `[B,H,G]` rows."""
        heads, group, size = query.shape[1:]
        scanned = read = None
        if chosen.scanned is not None:
            scanned = _of_each((chosen.scanned + chosen.attended)[..., None], heads, group)[..., 0]
            scanned = (scanned + base).flatten(1)
        if chosen.scan_bytes is not None:
            weighed = chosen.distinct(heads, self.stored_keys().shape[2]) + base.amax(2)  # the group shares its draws
            read = chosen.scan_bytes + weighed * (size * self.bytes_of(self.stored_keys()))
        return scanned, read


def _log_sum(scaled: Tensor, keys: Tensor, chosen: Selection) -> Tensor:
    """`[B,H,G]` float32: log-sum-exp of the logits of the rows chosen, for queries `[B,H,G,D]` divided by the
    temperature."""
    rows, heads = chosen.rows, keys.shape[1]  # [B,L,R], L = H or H*G
    batch, lists = rows.shape[:2]
    b = torch.arange(batch, device=keys.device)[:, None, None]
    h = (torch.arange(lists, device=keys.device) // (lists // heads))[None, :, None]
    logits = scaled.reshape(batch, lists, -1, keys.shape[3]) @ keys[b, h, rows.clamp(min=0)].float().mT
    return logits.masked_fill((rows < 0)[:, :, None], -torch.inf).logsumexp(-1).view(scaled.shape[:3])


def _of_each(x: Tensor, heads: int, group: int) -> Tensor:
    """`[B,H,G,..]` of `[B,Hs,..]`."""
    return x.unflatten(1, (heads, -1)).expand(-1, -1, group, *x.shape[2:])


def _every(rows: Tensor, group: int) -> Tensor:
    """`[B,H,G,n]` of `[B,H,n]`."""
    return rows[:, :, None].expand(-1, -1, group, -1)


def _rows(real: Tensor, rank: Tensor) -> Tensor:
    """`[B,A,M]` int64: the real rows of `real` `[B,N]` with these numbers `[B,A,M]` among them; any row for a number
    that is too large."""
    until = real.cumsum(-1)[:, None].expand(-1, rank.shape[1], -1).contiguous()
    return torch.searchsorted(until, (rank + 1).contiguous()).clamp(max=real.shape[1] - 1)


def _keys(keys: Tensor, rows: Tensor) -> Tensor:
    """`[B,H,n,D]` of `[B,H,N,D]`."""
    return keys.gather(2, rows[..., None].expand(-1, -1, -1, keys.shape[3]))


def _distinct(rows: Tensor, none: int) -> tuple[Tensor, Tensor]:
    """Each row once: ids `[B,H,G,M]`, -1 for the same one again and for `none`, and how often each is there."""
    ordered = rows.sort(-1).values
    again = torch.nn.functional.pad(ordered[..., 1:] == ordered[..., :-1], (1, 0))
    times = torch.zeros(*rows.shape[:3], none + 1, dtype=torch.int64, device=rows.device)
    times = times.scatter_add(3, rows, torch.ones_like(rows)).gather(3, ordered)
    return ordered.masked_fill(again | (ordered == none), -1), times
