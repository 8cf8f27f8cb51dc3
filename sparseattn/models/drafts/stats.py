"""What a lossless generation did: tokens, drafts, seconds of each, and ties."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LosslessStats:
    """Counts of one generation; `print` shows them in a sentence.

    Attributes:
        tokens: generated, of all sequences.
        drafted, accepted: tokens proposed by sparse steps, and those of them that full attention confirmed.
        rounds: verifications, by how many tokens were drafted; 0: a plain dense step.
        draft_steps: sparse steps.
        prefill_seconds, draft_seconds, verify_seconds, dense_seconds: of the prompt, of sparse steps, of verifications,
            and of plain dense steps.
        other_seconds: what is left: choosing tokens, stopping, the cache's books.
        ties: sequence and place behind the prompt of each token whose two best scores are nearer than rounding, so that
            another order of the same sums may choose the other. Greedy only.
        reason: why `draft="auto"` decoded densely at the end, in words; empty where it drafted.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    rounds: dict[int, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    dense_seconds: float = 0.0
    other_seconds: float = 0.0
    ties: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""

    @property
    def acceptance(self) -> float:
        """Accepted over drafted; NaN without drafts."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def seconds(self) -> float:
        """Of decoding, without the prompt's."""
        return self.draft_seconds + self.verify_seconds + self.dense_seconds + self.other_seconds

    def __str__(self) -> str:
        parts = [f"{self.tokens} tokens in {self.seconds:.2f} s"]
        if self.drafted:
            checked = sum(count for drafts, count in self.rounds.items() if drafts)
            parts.append(
                f"{self.accepted} of {self.drafted} drafts accepted ({self.acceptance:.0%}) in {checked} "
                f"verifications; drafting took {self.draft_seconds:.2f} s, verifying {self.verify_seconds:.2f} s"
            )
        if dense := self.rounds.get(0, 0):
            why = f", as {self.reason}" if self.reason else ""
            parts.append(f"{dense} plain dense steps took {self.dense_seconds:.2f} s{why}")
        parts.append(f"{len(self.ties)} ties")
        return "; ".join(parts)
