"""How many tokens to draft: a fixed number, or the one that gives the most tokens a second by what was measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LENGTHS = (1, 2, 3, 4, 6, 8)  # drafts that "auto" chooses among
FIRST, PROBE = 2, 4  # drafts of a round that measures: of the first, and where few were accepted; and else
FEW = 0.8  # accepted
GAIN = 1.05  # times dense decoding that drafting must promise
FADE = 0.95  # what a round leaves of the weight of earlier ones, in the estimate of acceptance
FORGET = 0.25  # what is left of that weight when drafting is tried again: the text may be another by then
WAIT, LONGEST_WAIT = 64, 1024  # dense steps before drafting is tried again: at first, and at most
AGAIN = 48  # rounds of drafts between two dense steps, which show what these take now
LEAST_SHARE = 0.15  # of a dense step's time: where attention takes less, no draft can pay
LEAST_BYTES = 0.3  # of what a dense step reads, where its time by parts is not known


@dataclass(frozen=True)
class Round:
    """What came of drafts and their check, or of a plain step.

    Args:
        drafts: how many; 0 of a plain step.
        accepted: how many of them each sequence accepted.
        draft_seconds: of drafting.
        verify_seconds: of checking, or of the plain step.
        attention_seconds: of `verify_seconds`, what attention took; None: not known.
    """

    drafts: int
    accepted: Sequence[int]
    draft_seconds: float
    verify_seconds: float
    attention_seconds: float | None = None


class DraftLength(ABC):
    """Says before each round how many tokens are drafted, and is told what came of it.

    Attributes:
        reason: why nothing is drafted, in words; empty where something is.
    """

    reason = ""

    @abstractmethod
    def next(self, context: int) -> int:
        """Return how many tokens to draft behind so many; 0: a plain dense step."""

    @abstractmethod
    def observe(self, came: Round) -> None:
        """Note what came of a round."""


class FixedLength(DraftLength):
    """Always as many."""

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts
        self.reason = "" if drafts else "draft=0 asks for"

    def next(self, context: int) -> int:
        """Return the number."""
        return self.drafts

    def observe(self, came: Round) -> None:
        """Learn nothing."""


class AutoLength(DraftLength):
    """As many as give the most tokens a second, by the acceptance and the seconds of this generation's own rounds.

    A round of k drafts is expected to give (1 - a^(k+1)) / (1 - a) tokens, where a is the chance that a draft is
    accepted behind accepted ones (https://arxiv.org/abs/2211.17192), for k draft steps and a verification of k + 1
    tokens. Verifications that have not been seen are on the line through those that have. First come two dense steps
    and two rounds of drafts, the first of each uncounted, as it compiles code and builds the index. The first round is
    short, and so are later trials where few drafts were accepted. Where dense steps are better, drafting is tried again
    after some of them, each time after twice as many. Where all of a short trial is accepted then, a longer one comes.

    Where attention takes less than `LEAST_SHARE` of plain steps, as their clock says, nothing is drafted. On a GPU the
    host's clock does not say it, so attention is to read `LEAST_BYTES` of a step's bytes or more there.

    Args:
        share: of a token, what attention to the whole context reads over all that a dense step reads besides, per
            token of context: bytes of rows over bytes of weights.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._verify: dict[int, deque[float]] = {}  # seconds by drafts
        self._draft: deque[float] = deque(maxlen=8)  # seconds a step
        self._attention: deque[float] = deque(maxlen=5)  # its share of plain steps
        self._hits = self._tries = 0.0
        self._plan = [0, 0, FIRST, PROBE]  # rounds to come that measure
        self._warm: set[bool] = set()  # whether a dense step and a drafting round have been seen
        self._wait, self._waited, self._since = WAIT, 0, 0
        self._again = False  # whether the round to come tries drafts again

    def next(self, context: int) -> int:
        """Return how many tokens to draft."""
        if (not self._plan or self._plan[0]) and (why := self._too_small(context)):
            self.reason = f"attention {why} at {context:,} tokens, less than drafts need"
            return 0
        if self._plan:
            return self._plan[0]
        best = self.best()
        if best:
            self.reason = ""
            self._wait, self._waited = WAIT, 0
            if self._since >= AGAIN:
                self._plan = [0]
                return 0
            return best
        self.reason = f"no number of drafts promises {GAIN:g} times dense decoding at {context:,} tokens"
        if self._waited >= self._wait:
            self._wait, self._waited = min(2 * self._wait, LONGEST_WAIT), 0
            self._hits, self._tries = FORGET * self._hits, FORGET * self._tries
            self._plan, self._again = [PROBE if self.acceptance > FEW else FIRST], True
            return self._plan[0]
        self._waited += 1
        return 0

    def observe(self, came: Round) -> None:
        """Note what came of a round."""
        drafts, accepted, seconds = came.drafts, came.accepted, came.verify_seconds
        if self._plan and bool(self._plan[0]) == bool(drafts):  # a plain step in place of drafts measures none
            self._plan.pop(0)
        if drafts:
            self._hits = FADE * self._hits + sum(accepted)
            self._tries = FADE * self._tries + sum(min(count + 1, drafts) for count in accepted)
        self._since = self._since + 1 if drafts else 0
        if drafts and self._again:
            self._again = False
            if drafts < PROBE and min(accepted) == drafts:
                self._plan = [PROBE]
        if (drafts > 0) not in self._warm:
            self._warm.add(drafts > 0)
            if drafts and self.acceptance <= FEW:
                self._plan = [FIRST]
            return
        self._verify.setdefault(drafts, deque(maxlen=5)).append(seconds)
        if not drafts and came.attention_seconds is not None:
            self._attention.append(came.attention_seconds / seconds)
        if drafts:
            self._draft.append(came.draft_seconds / drafts)

    def _too_small(self, context: int) -> str:
        """Return what part of a plain step attention is behind so many tokens, if that is too small; else ""."""
        if self._attention:
            taken = median(self._attention)
            return f"takes {taken:.0%} of a plain step" if taken < LEAST_SHARE else ""
        read = 1 - 1 / (1 + self._share * context)
        return f"reads {read:.0%} of a plain step's bytes" if read < LEAST_BYTES else ""

    @property
    def acceptance(self) -> float:
        """The chance that a draft is accepted behind accepted ones."""
        return self._hits / self._tries if self._tries else 0.0

    def verify_seconds(self, drafts: int) -> float:
        """Return what checking so many drafts takes: measured, or on the line through the nearest that were."""
        if drafts in self._verify:
            return median(self._verify[drafts])
        nearest = sorted(self._verify, key=lambda seen: abs(seen - drafts))[:2]
        (first, here), (second, there) = ((seen, median(self._verify[seen])) for seen in nearest)
        slope = max((there - here) / (second - first), 0.0)
        return max(here + slope * (drafts - first), 0.0)

    def rate(self, drafts: int) -> float:
        """Return the tokens a second expected of rounds of so many drafts."""
        chance = min(self.acceptance, 0.999)
        tokens = (1 - chance ** (drafts + 1)) / (1 - chance)
        return tokens / (drafts * median(self._draft) + self.verify_seconds(drafts)) if drafts else 1 / self.dense

    @property
    def dense(self) -> float:
        """Seconds of a dense step."""
        return self.verify_seconds(0)

    def best(self) -> int:
        """Return the number of drafts with the most tokens a second; 0 where none beats dense decoding by `GAIN`."""
        drafts = max(LENGTHS, key=self.rate)
        return drafts if self.rate(drafts) > GAIN * self.rate(0) else 0
