"""What attention of a model takes where the rows of a sequence are dealt to ranks: memory, bytes sent, time.

A rank does what one process does over its part of the rows (`core.step_cost`), and sends what `core.rank_traffic` says.
Every rank has the whole model: its weights are no part of these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparseattn.cache.rank_checks import check_dealable
from sparseattn.cache.rank_choice import require_scores
from sparseattn.core.budget import Rows, budget_rows
from sparseattn.core.context import LayerContext
from sparseattn.core.rank_traffic import Traffic, traffic
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import dense_cost, step_cost
from sparseattn.cost_model.index_bytes import SINK, WINDOW, index_bytes
from sparseattn.cost_model.links import Link
from sparseattn.cost_model.model_steps import DENSE, Workload
from sparseattn.selectors.registry import make_selector

SEAL = 1024  # rows that wait at most, the default of a cache


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's part of a decode step of all layers that see the whole context.

    Args:
        method: as it is typed; "dense" for full attention.
        ranks: how many.
        kv: bytes of keys and values that a rank keeps, those of sink, window and waiting rows among them.
        index: bytes of the method's index.
        read: bytes that it reads of both.
        sent: bytes that it sends.
        attention: seconds of reading and computing.
        link: seconds of sending.
        reason: why there is no prediction.
    """

    method: str
    ranks: int
    kv: float = 0.0
    index: float = 0.0
    read: float = 0.0
    sent: float = 0.0
    attention: float | None = None
    link: float | None = None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """Attention and link, one after the other."""
        return None if self.attention is None or self.link is None else self.attention + self.link


@dataclass(frozen=True, slots=True)
class Dealt:
    """A workload whose rows are dealt to ranks.

    Args:
        work: of one process: a machine, which every rank is, a model, a context.
        ranks: how many.
        link: between them.
    """

    work: Workload
    ranks: int
    link: Link

    @property
    def rows(self) -> int:
        """Of each sequence, at one rank."""
        return -(-self.work.context // self.ranks)

    @property
    def query(self) -> tuple[int, int, int, int]:
        """B, H, G, D."""
        model = self.work.model
        return self.work.batch, model.num_kv_heads, model.group, model.head_dim

    @property
    def kv(self) -> float:
        """Bytes of keys and values at one rank: its part, and the few rows that all keep."""
        model, work = self.work.model, self.work
        few = SINK + WINDOW + SEAL if self.ranks > 1 else 0
        return work.batch * model.kv_bytes(min(self.rows + few, work.context), work.dtype)

    def dense(self) -> RankStep:
        """Return the step that reads every row."""
        work, full = self.work, self.work.model.full
        cost = dense_cost(work.model.attention(work.batch, work.dtype), self.rows)
        sent = self._traffic(0, "max", exact=False)
        return self._step(DENSE, 0.0, full * cost.bytes, sent, full * work.machine.seconds(cost))

    def method(self, spec: str, budget: Rows, exact: bool) -> RankStep:
        """Return a method's step, with `exact` or the union's choice.

        Raises:
            ValueError: a method that cannot be predicted, or shared so.
        """
        work, model = self.work, self.work.model
        shape = model.attention(work.batch, work.dtype)
        selector = make_selector(spec).for_layer(LayerContext(0, rope=Rope.of(shape.size)))
        selector.check_shape(shape.heads, shape.group, shape.size)
        check_dealable(selector)
        if exact:
            require_scores(selector)
        rows = budget_rows(budget, work.context, selector.span, selector)
        part = max(-(-rows // (self.ranks * selector.span)), 1) * selector.span
        cost = step_cost(selector, shape, self.rows, part, sink=SINK, window=WINDOW)
        slots = min(rows, self.rows) // selector.span
        sent = self._traffic(slots, getattr(selector, "group", "max"), exact)
        index = index_bytes(spec, model.num_kv_heads, model.group, model.head_dim, work.dtype)
        bytes_stored = work.batch * model.full * index.at(self.rows)
        return self._step(spec, bytes_stored, model.full * cost.bytes, sent, model.full * work.machine.seconds(cost))

    def _traffic(self, slots: int, group: str, exact: bool) -> Traffic:
        element = torch.finfo(self.work.dtype).bits // 8
        return traffic(self.ranks, self.query, slots=slots, group=group, exact=exact, element=element)

    def _step(self, method: str, index: float, read: float, sent: Traffic, seconds: float) -> RankStep:
        full = self.work.model.full
        link = full * self.link.seconds(sent, self.ranks)
        return RankStep(method, self.ranks, self.kv, index, read, full * sent.sent, seconds, link)


def rank_steps(dealt: Dealt, methods: Sequence[str], budget: Rows, exact: bool = True) -> list[RankStep]:
    """Return the dense step and each method's; one that cannot be predicted says why.

    Raises:
        ValueError: no such method.
    """
    steps = [dealt.dense()]
    for spec in methods:
        make_selector(spec)
        try:
            steps.append(dealt.method(spec, budget, exact))
        except ValueError as error:
            steps.append(RankStep(spec, dealt.ranks, reason=str(error)))
    return steps


def record(dealt: Dealt, steps: Sequence[RankStep]) -> dict[str, Any]:
    """Return steps as JSON holds them."""
    work = dealt.work
    return {
        "model": work.model.name,
        "layers": work.model.full,
        "context": work.context,
        "batch": work.batch,
        "ranks": dealt.ranks,
        "link": asdict(dealt.link),
        "steps": [asdict(step) | {"seconds": step.seconds} for step in steps],
    }
