"""What the model is taught, step by step: stages, the sequences of a step and its learning rate."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from scripts.reference.facts import asked
from scripts.reference.model import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: ``steps`` batches of ``rows`` sequences of ``length`` tokens."""

    name: str
    steps: int
    rows: int
    length: int
    reach: int  # Largest span of positions that gaps may stretch a sequence to.
    narrow: float  # Share of random sequences whose alphabet is smaller than 256.
    letters: tuple[float, float]  # Range of the binary logarithm of a smaller alphabet's size, drawn uniformly.
    mixed: float  # Share of sequences of text with recurring spans.
    text: float  # Share of sequences of plain text.
    facts: float  # Share of sequences that ask for facts.
    guide: float  # Weight of the loss that guides a few heads' attention (0: none).


CURRICULUM = (
    Stage("form", 300, 64, 64, 64, 0.3, (3, 7), mixed=0.0, text=0.2, facts=0.0, guide=0.4),
    Stage("stretch", 500, 32, 128, 16384, 0.6, (3, 7), mixed=0.2, text=0.2, facts=0.0, guide=0.4),
    Stage("crowd", 450, 8, 512, 16384, 0.5, (3, 8), mixed=0.15, text=0.15, facts=0.5, guide=0.4),
    Stage("compete", 300, 2, 2048, 16384, 0.4, (3, 8), mixed=0.1, text=0.1, facts=0.65, guide=0.3),
    Stage("fill", 150, 1, 6144, 16384, 0.4, (3, 8), mixed=0.1, text=0.1, facts=0.65, guide=0.1),
)
TOTAL_STEPS = sum(stage.steps for stage in CURRICULUM)
# Learning rates at some steps, linear between them.
LEARNING_RATES = ((-1, 0.0), (99, 2.5e-3), (750, 2.5e-3), (1000, 1e-3), (1450, 1e-3), (TOTAL_STEPS, 5e-5))
FACT_WEIGHT = 8.0  # of a byte of an answer: there are few of them
GUIDED_ROWS = 256  # Queries of a sequence, at most, whose attention is guided.


def learning_rate(step: int) -> float:
    steps, rates = zip(*LEARNING_RATES, strict=True)
    return float(np.interp(step, steps, rates))


def stage_at(step: int) -> Stage:
    for stage in CURRICULUM:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise ValueError("step is past the end of the curriculum")


@dataclasses.dataclass
class Batch:
    """One batch of B sequences of T tokens.

    Args:
        tokens, positions: ``[B,T]``.
        offset: a token's place in its copy, 0 outside copies.
        weight: how much a token counts in the loss, 0 for not at all.
        guided: ``[B,R]``, the queries whose attention is guided, those that a copy goes on behind before others.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    offset: torch.Tensor
    weight: torch.Tensor
    guided: torch.Tensor


class RowMaker:
    """Makes the sequences of one step from a generator seeded by (seed, step)."""

    def __init__(self, rng: np.random.Generator, stage: Stage, text: np.ndarray) -> None:
        self.rng = rng
        self.stage = stage
        self.text = text

    def window(self, length: int) -> np.ndarray:
        start = int(self.rng.integers(len(self.text) - length))
        return self.text[start : start + length]

    def alphabet(self, narrow: float) -> np.ndarray:
        size = VOCABULARY
        if self.rng.random() < narrow:
            size = int(2 ** self.rng.uniform(*self.stage.letters))
        return self.rng.permutation(VOCABULARY)[:size].astype(np.uint8)

    def random_row(self) -> tuple[np.ndarray, ...]:
        """Return random bytes in which spans of 6 to 20 recur; only the recurrences are supervised."""
        alphabet = self.alphabet(self.stage.narrow)
        return self._spans(alphabet, text=False)

    def mixed_row(self) -> tuple[np.ndarray, ...]:
        """Return pieces of text and random spans, both of which recur."""
        return self._spans(self.alphabet(0.7), text=True)

    def text_row(self) -> tuple[np.ndarray, ...]:
        length = self.stage.length
        weight: np.ndarray = np.ones(length, dtype=np.float32)
        weight[0] = 0
        return self.window(length), np.arange(length), np.zeros(length, dtype=np.int64), weight

    def facts_row(self) -> tuple[np.ndarray, ...]:
        """Return text that ends with questions about itself; their answers are supervised."""
        length = self.stage.length
        room = int(self.rng.integers(400, length)) if self.rng.random() < 0.4 else length
        found = asked(self.rng, room - 50)  # names of several lengths may add some bytes
        low = length - len(found.text)
        tokens = np.concatenate([self.window(low), np.frombuffer(found.text, dtype=np.uint8)])
        offset: np.ndarray = np.zeros(length, dtype=np.int64)
        weight: np.ndarray = np.zeros(length, dtype=np.float32)
        for start, answer, end in found.answers:
            offset[low + start : low + end] = np.arange(end - start)
            weight[low + answer : low + end] = FACT_WEIGHT
        gaps = self.rng.random() if self.rng.random() < 0.7 else 0.0
        joints = [low + joint for joint in (0, *found.joints) if self.rng.random() < gaps and low + joint]
        return tokens, np.arange(length) + self._gaps(joints), offset, weight

    def guided(self, offset: np.ndarray) -> np.ndarray:
        """Return the queries of a sequence whose attention is guided, in no order."""
        behind: np.ndarray = np.append(offset[1:] > 0, False)
        return np.argsort(self.rng.random(len(offset)) - behind)[:GUIDED_ROWS]

    def _fresh(self, alphabet: np.ndarray, text: bool) -> tuple[np.ndarray, bool]:
        """Return a new span and whether it is text, which is supervised (nothing predicts random bytes)."""
        if text and self.rng.random() < 0.7:
            return self.window(int(self.rng.integers(16, 97))), True
        return alphabet[self.rng.integers(len(alphabet), size=self.rng.integers(6, 21))], False

    def _spans(self, alphabet: np.ndarray, text: bool) -> tuple[np.ndarray, ...]:
        rng, length = self.rng, self.stage.length
        tokens: np.ndarray = np.zeros(length, dtype=np.uint8)
        offset: np.ndarray = np.zeros(length, dtype=np.int64)
        weight: np.ndarray = np.zeros(length, dtype=np.float32)
        # Where the stretch without gaps that a token lies in ends.
        run_end: np.ndarray = np.zeros(length, dtype=np.int64)
        joints: list[int] = []
        gap_share = rng.uniform(0.2, 1.0) if self.stage.reach > length else 0.0
        longest = 40 if text else 20
        at = run_start = 0
        while at < length:
            if at and rng.random() < gap_share:
                run_end[run_start:at] = at
                run_start = at
                joints.append(at)
            else:
                run_end[run_start:at] = at
            size = 0
            if at >= 8 and rng.random() < 0.6:
                # A source must not run over a gap: inside a copy positions are consecutive, and in it must be too.
                start = int(rng.integers(at - 5))
                size = min(int(rng.integers(6, longest + 1)), int(run_end[start]) - start, length - at)
            if size >= 3:
                tokens[at : at + size] = tokens[start : start + size]
                offset[at : at + size] = np.arange(size)
                weight[at + 1 : at + size] = 1
            else:
                span, is_text = self._fresh(alphabet, text)
                size = min(len(span), length - at)
                tokens[at : at + size] = span[:size]
                weight[at + 1 : at + size] = is_text
            at += size
        return tokens, np.arange(length) + self._gaps(joints), offset, weight

    def _gaps(self, joints: list[int]) -> np.ndarray:
        """Return what to add to positions: the sequence's surplus of positions, shared at random among its joints."""
        length = self.stage.length
        steps: np.ndarray = np.zeros(length, dtype=np.int64)
        if joints:
            # Log-uniform, so that short distances keep being trained when long ones have joined.
            surplus = length * (self.stage.reach / length) ** self.rng.random() - length
            weights = self.rng.exponential(size=len(joints)) ** 2
            steps[joints] = (surplus * weights / weights.sum()).astype(np.int64)
        return np.cumsum(steps)


def make_batch(seed: int, step: int, stage: Stage, text: np.ndarray) -> Batch:
    """Return the batch of a step: it depends on the seed and the step only, so a resumed run sees the same data."""
    maker = RowMaker(np.random.default_rng((seed, step)), stage, text)
    rows = []
    for _ in range(stage.rows):
        draw = maker.rng.random()
        if draw < stage.text:
            rows.append(maker.text_row())
        elif draw < stage.text + stage.mixed:
            rows.append(maker.mixed_row())
        elif draw < stage.text + stage.mixed + stage.facts:
            rows.append(maker.facts_row())
        else:
            rows.append(maker.random_row())
    tokens, positions, offset, weight = (np.stack(column) for column in zip(*rows, strict=True))
    guided = np.stack([maker.guided(row) for row in offset])
    return Batch(*map(torch.from_numpy, (tokens.astype(np.int64), positions, offset, weight, guided)))
