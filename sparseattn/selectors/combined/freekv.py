"""FreeKV: a choice is kept while the queries stay alike, for each KV head. https://arxiv.org/abs/2505.13109"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparseattn.core.row_buffer import State
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, both
from sparseattn.selectors.abilities import Evicts, FollowsLayers
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import check_query_heads
from sparseattn.selectors.combined.wrapper import Wrapper
from sparseattn.selectors.pages.quest import Quest
from sparseattn.selectors.saved_state import Loaded, of_parts


class KeptChoices(State):
    """For every sequence and KV head the last choice, the query it was made for, and how often it was read again.

    Attributes:
        parts: by name, B first: `real` `[B]` int64, real rows shown so far; from the first choice on `reused` `[B,H]`
            int64, steps that read one again, `query` `[B,H,G,D]`, `start` and `length` `[B,Hs,S]`, `bias` if there is
            one, and `every` `[B,H]` int64, the real rows there were where the choice named all of them, else -1.
        span, whole: of the choice.
        steps: at which something could be chosen.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self.rows, self.steps, self.span, self.whole = 0, 0, 1, True

    def fresh(self) -> KeptChoices:
        return KeptChoices()

    def clone(self) -> KeptChoices:
        copy = KeptChoices()
        copy.parts = {name: part.clone() for name, part in self.parts.items()}
        copy.rows, copy.steps, copy.span, copy.whole = self.rows, self.steps, self.span, self.whole
        return copy

    def take(self, index: Tensor) -> None:
        self.parts = {name: part[index.to(part.device)] for name, part in self.parts.items()}

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def to(self, device: torch.device | str) -> None:
        self.parts = {name: part.to(device) for name, part in self.parts.items()}

    def saved(self) -> dict[str, Tensor]:
        numbers = {"rows": self.rows, "steps": self.steps, "span": self.span, "whole": int(self.whole)}
        tensors = {name: torch.tensor(number) for name, number in numbers.items()}
        return tensors | {f"part.{name}": part for name, part in self.parts.items()} if self.rows else {}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        self.parts = {name[5:]: part.to(device) for name, part in tensors.items() if name.startswith("part.")}
        self.rows, self.steps, self.span = (int(tensors[name]) for name in ("rows", "steps", "span"))
        self.whole = bool(tensors["whole"])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def shown(self, real: Tensor) -> None:
        """Rows have come, `real` `[B,n]` bool."""
        count = real.sum(1)
        self.parts["real"] = self.parts["real"] + count if self.rows else count
        self.rows += real.shape[1]

    def forget(self) -> None:
        """Make the choices void, such as where rows have moved; what is counted stays."""
        self.parts = {name: self.parts[name] for name in ("real", "reused") if name in self.parts}

    def choice(self) -> Selection | None:
        """Return the last one, without what it cost; None before there is one."""
        if "query" not in self.parts:
            return None
        return Selection(
            self.parts["start"], self.parts["length"], self.span, whole=self.whole, bias=self.parts.get("bias")
        )

    def keep(self, chosen: Selection, query: Tensor, anew: Tensor) -> None:
        """`chosen` is the choice from now on, of the heads `anew` `[B,H]` for `query` and of others as before."""
        heads = query.shape[1]
        named = chosen.attended.unflatten(1, (heads, -1)).amin(2)
        every = torch.where(named >= (real := self.parts["real"][:, None]), real, -1)
        if "query" in self.parts:
            query = torch.where(anew[..., None, None], query, self.parts["query"])
            every = torch.where(anew, every, self.parts["every"])
        else:
            query = query.clone()
        self.parts |= {"query": query, "every": every, "start": chosen.start, "length": chosen.length}
        self.parts.pop("bias", None)
        if chosen.bias is not None:
            self.parts["bias"] = chosen.bias
        self.span, self.whole = chosen.span, chosen.whole

    def count(self, anew: Tensor) -> None:
        """Note that a step has chosen for the heads `anew` `[B,H]` and has read again what the others had."""
        again = (~anew).long()
        self.parts["reused"] = self.parts["reused"] + again if "reused" in self.parts else again
        self.steps += 1


class FreeKV(Wrapper):
    """Reads what it read last, for each KV head whose queries are still like those that it was chosen for.

    Args:
        inner: what chooses, a selector or its name; Quest in the paper. Any but those that drop rows.
        tau: a KV head keeps its choice where the cosine between the step's queries, after RoPE, and those that the
            choice was made for is at least this, in the mean over its query heads; else it chooses anew. -1 keeps the
            first choice, 1 keeps it for equal queries alone.
        refresh: whether a head that keeps its choice at this step makes the next one's all the same, as in the paper.
            So the paper always compares with the step before, and reads at a step what the step before would have
            chosen: every step scans, and what is saved is waiting for it. False (default, ours): the choice stays with
            the query that it was made for, and nothing is scanned until that one is too far.

    A choice is also made anew where the budget has become less than what it reads, and where it named every row there
    was and rows have come since. Rows that are sealed while a choice is kept are not in it. A `bias` stays with the
    rows that it was drawn with. An inner method that moves rows already stored makes every head choose anew.

    The inner method is asked for all heads of a batch if any needs it, which the host finds out: a step on a GPU waits
    for it, and no CUDA graph holds it. `scanned` and `scan_bytes` are 0 for heads that keep their choice, as where each
    head is asked alone. `reused` is the share of steps and KV heads that kept it.

    Raises:
        ValueError: `tau` that is no cosine, or an inner method that drops rows or chooses for other layers.
    """

    operators = 16

    def __init__(self, inner: Selector | str = "quest", tau: float = 0.9, refresh: bool = False) -> None:
        if not -1 <= tau <= 1:
            raise ValueError(f"tau is a cosine, -1 to 1, got {tau}")
        super().__init__(inner)
        self.tau, self.refresh = tau, refresh
        if self.inner.find(Evicts):
            raise ValueError(
                f"a choice that is kept may name rows that {self.inner} has dropped since: take a method that does "
                f"not evict"
            )
        if self.inner.find(FollowsLayers):
            raise ValueError(
                f"layers that read the choice of another need one at every step, and {self.inner} would not be asked "
                f"at some: wrap what its anchors choose by, as in kascade:anchors=[0,2],inner=[freekv:tau=0.9]"
            )
        self.last = KeptChoices()

    @classmethod
    def paper(cls, tau: float = 0.8) -> dict[str, Any]:
        """Return the setting of the authors' runs on LongBench v2, as arguments of `KVCache`: Quest's pages of 32 by
        the mean probability of a group, and 128 rows of sink and of window. Layer 0 stays dense there, and `tau` is 0.9
        where much is generated. Their budget of 2,048 counts sink and window: 1,792 here."""
        return {"selector": cls(Quest(32, "softmax"), tau, refresh=True), "sink": 128, "window": 128, "seal": 32}

    @property
    def reused(self) -> float:
        """Share of the choices, of steps and KV heads, that were read again; NaN before there was any. Reading it waits
        for the device."""
        counted = self.last.parts.get("reused")
        return float("nan") if counted is None else float(counted.double().mean()) / self.last.steps

    def fix(self, rows: int, seal: int) -> None:
        raise ValueError(
            f"{self} asks {self.inner} only where a head needs it, so the host waits for the device at every step: "
            f"build the KVCache without fixed=True"
        )

    def append(self, rows: Rows) -> Tensor | None:
        order = self.inner.append(rows)
        self.last.shown(rows.positions >= 0)
        if order is not None and order.shape[2] > rows.keys.shape[2]:
            self.last.forget()
        return order

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        self.inner.check_state(of_parts(state, "inner")["inner"], rows, order)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if "query" in self.last.parts:
            check_query_heads(query, self.last.parts["query"].shape[2])
        anew = self._anew(query, budget)  # [B,H]
        self.last.count(anew)
        before = self.last.choice()
        if before is not None and not self.refresh and not bool(anew.any()):
            return _costing(before, _nothing(before.start.shape[:2], anew), _nothing(anew.shape, anew))
        made = self.inner.counted(self.inner.select(query, step, budget), query, step, budget)
        read = made if before is None else _either(anew, made, before)
        if self.refresh:
            self.last.keep(made, query, torch.ones_like(anew))
            return _costing(read, _as_wide(made.scanned, read), made.scan_bytes)
        self.last.keep(read, query, anew)
        return _costing(read, _where(anew, _as_wide(made.scanned, read)), _where(anew, made.scan_bytes))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        scan = self.inner.full_scan(query, sealed, budget)
        if scan is None:
            return None
        expected = both(scan.expected, "every head chooses again in this step")
        return replace(scan, launches=(*scan.launches, Launch("operator", count=self.operators)), expected=expected)

    def _anew(self, query: Tensor, budget: int) -> Tensor:
        """`[B,H]` bool: which KV heads read a choice of this step's query."""
        parts = self.last.parts
        if "query" not in parts:
            return torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
        like = functional.cosine_similarity(query.float(), parts["query"].float(), dim=-1).mean(2)
        most = parts["length"].sum(-1).unflatten(1, (query.shape[1], -1)).amax(2)
        had_all = (parts["every"] >= 0) & (parts["every"] < parts["real"][:, None])
        return (like < self.tau) | (most > budget) | had_all


def _either(first: Tensor, kept: Selection, other: Selection) -> Selection:
    """Of the KV heads `first` `[B,H]` what `kept` chose, of the others what `other` did; without costs."""
    heads, slots = (max(chosen.start.shape[dim] for chosen in (kept, other)) for dim in (1, 2))
    mine = first.repeat_interleave(heads // first.shape[1], 1)[..., None]

    def part(name: str) -> Tensor:
        own, others = (_padded(getattr(chosen, name), chosen, heads, slots) for chosen in (kept, other))
        return torch.where(mine, own, others)

    bias = None
    if kept.bias is not None or other.bias is not None:
        bias = part("bias")
    start, length = part("start"), part("length")
    used = [chosen for chosen in (kept, other) if chosen.start.shape[2]]
    span = max((chosen.span for chosen in used), default=1)
    return Selection(start, length, span, whole=all(c.whole and c.span == span for c in used), bias=bias)


def _padded(part: Tensor | None, chosen: Selection, heads: int, slots: int) -> Tensor:
    """Return a part of a choice for so many selection heads and slots, 0 where there was none."""
    part = torch.zeros_like(chosen.start, dtype=torch.float32) if part is None else part
    part = part.repeat_interleave(heads // part.shape[1], 1)
    return functional.pad(part, (0, slots - part.shape[2]))


def _costing(chosen: Selection, scanned: Tensor | None, read: Tensor | None) -> Selection:
    """Return the same rows at another cost."""
    return Selection(chosen.start, chosen.length, chosen.span, scanned, read, chosen.whole, chosen.bias)


def _nothing(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=like.device)


def _as_wide(cost: Tensor | None, chosen: Selection) -> Tensor | None:
    """Return a cost of each selection head, for as many as a choice has."""
    return cost if cost is None else cost.repeat_interleave(chosen.start.shape[1] // cost.shape[1], 1)


def _where(anew: Tensor, cost: Tensor | None) -> Tensor | None:
    """Return a cost of the heads that chose, 0 for the others."""
    return cost if cost is None else cost * anew.repeat_interleave(cost.shape[1] // anew.shape[1], 1)
