"""MagicPIG: rows drawn by hashes that collide with the query's, weighed by how likely that was.

https://arxiv.org/abs/2410.16179
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, products
from sparseattn.kernels.random_draws import draws, streams
from sparseattn.selectors.abilities import Biases, ReadsKeys
from sparseattn.selectors.base import Rows, StepContext, best
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.hashing.projection_base import Hashed, packed

CHUNK = 1 << 24  # numbers made at once: 64 MiB
LEAST = 1e-12  # of a probability: below it float64 has no digits of it left, and no row is ever drawn with it


class MagicPIG(Biases, ReadsKeys, Hashed):
    """Samples rows by hash tables, and corrects their logits by the logarithm of the probability.

    Each of `tables` tables hashes keys and queries by the signs of their products with `bits` random directions. A row
    is drawn if it collides with the query in two tables or more, so with a probability w that depends on the angle
    between the query and its key alone, see `probability`; keys are taken without their mean, which spreads the angles.
    In the softmax it counts `1 / w` times, `-log w` on its logit: over the draw of the directions, the sums of a
    softmax, numerator and denominator, are right in the mean. Sink and window, read always, count once. Every query
    head has a sample of its own.

    The sample's size is random, and a budget caps it. Where more rows are drawn, an even subsample of them is read, of
    the budget's size, and each counts as many times more as there are rows for one: the sums stay right in the mean,
    with more variance. Which rows, a hash of (seed, layer, head, position of the query, position of the row) says.
    Where fewer are drawn, the rest of the budget is not used.

    Args:
        bits: K, signs of a table, 0 to 15; 0: everything collides, with probability 1.
        tables: L, 2 or more; 150 with 10 bits, 75 with 8 in the paper's main settings.
        floor: added to w before its logarithm, so that a row drawn against all odds does not count a million times.
            1e-4 in the authors' code; with 0 the sums are exactly right in the mean.
        seed: of the directions, one set for all heads and layers, which stays: errors of two steps, heads or layers are
            not independent.

    An index row takes `2 * tables` bytes for each KV head.

    Departures. The mean is that of a sequence's first sealed keys, its prompt's, and rows sealed later are hashed about
    it as well; the authors' code never indexes rows of the answer. Tables are signatures in the order of the rows,
    compared one table after the other, and not lists of the rows in each bucket: the same rows, at a cost that grows
    with the context. The cap is ours. Which layers are dense (two of Llama's 32 in the paper) is the caller's choice,
    as are sink and window (4 and 64 there).

    `scanned`: rows, as every row's signatures are compared. `scan_bytes`: these signatures, and of the directions the
    part of a KV head: they are read once for all heads. Keys of the rows drawn are not counted: their probability needs
    the product with the query, which attention forms, though here torch forms it once more.

    Raises:
        ValueError: an argument out of its range.
    """

    operators = 160
    shared = True

    def __init__(self, bits: int = 10, tables: int = 150, floor: float = 1e-4, seed: int = 0) -> None:
        check_least(bits=(bits, 0), tables=(tables, 2))
        if bits > 15:
            raise ValueError(f"bits is 15 or less, which keeps a signature in 2 bytes, got {bits}")
        if tables > 1 << 14:
            raise ValueError(f"tables is {1 << 14:,} or less, got {tables:,}")
        if not 0 <= floor < 1:
            raise ValueError(f"floor is a probability below 1, 0 for none, got {floor}")
        super().__init__(seed)
        self.bits, self.tables, self.floor = bits, tables, floor
        self.codes = RowBuffer(3)  # [B,H,L,N] int16
        self.at = RowBuffer(1, spare=-1)  # [B,N] int64 positions of the rows
        self.centre = RowBuffer(2, capacity=1)  # [B,H,1,D] float32
        self.known = RowBuffer(1, capacity=1)  # [B,1] bool, whether a sequence has a centre

    @property
    def count(self) -> int:
        return self.tables * self.bits

    def fix(self, rows: int, seal: int) -> None:
        self.codes.fix(rows)
        self.at.fix(rows)
        self.centre.fix(1)
        self.known.fix(1)

    def append(self, rows: Rows) -> None:
        self.draw(rows.keys)
        batch, heads, _, size = rows.keys.shape
        valid = rows.positions >= 0
        if not self.known.rows:
            self.known.append(torch.zeros_like(valid[:, :1]))
            self.centre.append(torch.zeros(batch, heads, 1, size, device=valid.device))
        fresh = valid.any(1) & ~self.known.data[:, 0]
        for b in fresh.nonzero()[:, 0].tolist():
            self.centre.data[b] = rows.keys[b][:, valid[b]].float().mean(1, keepdim=True)
        self.known.data[:, 0] |= fresh
        self.at.append(rows.positions)
        step = max(CHUNK // (batch * heads * max(self.count, 1)), 1)
        parts = [self._signatures(part.float() - self.centre.data) for part in rows.keys.split(step, 2)]
        self.codes.append(torch.cat(parts, 3))

    def _signatures(self, x: Tensor) -> Tensor:
        """Return the hash of `x` `[B,H,n,D]` in every table: `[B,H,L,n]` int16."""
        signs = (self.projected(x) > 0).unflatten(-1, (self.bits, self.tables))
        return packed(signs.movedim(-2, -1)).mT.short()

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        batch, heads, group, _ = query.shape
        codes, at = self.codes.visible, self.at.visible
        signatures = self._signatures(query)[..., None]  # [B,H,L,G,1]
        times = torch.zeros(batch, heads, group, at.shape[1], dtype=torch.int16, device=at.device)
        for table in range(self.tables):
            times += codes[:, :, table, None] == signatures[:, :, table]
        times = times.masked_fill_(~step.valid[:, None, None], 0).flatten(1, 2)  # [B,Hs,N]
        drawn = times >= 2
        each = [head * group + g for head in self.head_numbers(heads) for g in range(group)]
        order = (draws(streams(self.seed, self.layer, each, at.device), step.positions, at) >> 11).double()
        ids = best(order.masked_fill(~drawn, -torch.inf), budget)  # [B,Hs,S]
        cap = (drawn.sum(-1, keepdim=True) / max(ids.shape[2], 1)).clamp(min=1).log()  # [B,Hs,1]
        bias = torch.where(ids >= 0, cap - self._logarithm(query, ids), 0.0).float()
        return Selection.tokens(ids, bias=bias)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        (batch, heads, group, size), rows = query.shape, min(budget, sealed)
        read = 2 * self.tables * sealed + self.directions_read(heads, size)
        hashing = products(query, self.count, size)
        comparing = Launch("names", batch * heads * read, entries=batch * heads * group * sealed * self.tables)
        weighing = Launch("walk", entries=batch * heads * group * rows)
        expected = "as many tokens collide as the budget allows"
        scoring = hashing, comparing, weighing
        return self.ranked(query, Scan(sealed, read), scoring, (sealed, rows), expected=expected)

    def _logarithm(self, query: Tensor, ids: Tensor) -> Tensor:
        """Return the logarithm of the probability, with the floor, with which rows `ids` were drawn: `[B,Hs,S]`
        float64."""
        batch, heads, group, size = query.shape
        keys, query = self.stored_keys(), query.float()[:, :, :, None]
        logarithms = []
        for part in ids.split(max(CHUNK // (batch * heads * group * size), 1), 2):
            place = part.clamp(min=0).unflatten(1, (heads, group)).flatten(2)[..., None].expand(-1, -1, -1, size)
            key = (keys.gather(2, place).float() - self.centre.visible).unflatten(2, (group, -1))  # [B,H,G,s,D]
            norms = (key.norm(dim=-1) * query.norm(dim=-1)).clamp(min=torch.finfo(torch.float32).tiny)
            cosine = ((key * query).sum(-1) / norms).double().clamp(-1, 1)
            logarithms.append((probability(cosine, self.bits, self.tables) + self.floor).log())
        return torch.cat(logarithms, 3).flatten(1, 2)


def probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """Return the probability that two vectors collide in at least two of L = `tables` tables of K = `bits` sign bits.

    With `p = 1 - angle / pi`, that of one sign, it is `1 - (1 - p^K)^(L-1) (1 + (L-1) p^K)`.

    Args:
        cosine: float64, of the angle between the vectors, -1 to 1.

    Returns:
        The shape of `cosine`, from 1e-12 to 1.
    """
    of_table = (1 - cosine.acos() / torch.pi) ** bits
    none_or_one = (tables - 1) * (-of_table).log1p() + ((tables - 1) * of_table).log1p()
    return (-none_or_one.expm1()).clamp(LEAST, 1)
