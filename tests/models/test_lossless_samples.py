"""Lossless generation that samples: what is accepted and drawn is distributed as full attention's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparseattn.models.cache_argument import cache_argument  # noqa: E402
from sparseattn.models.drafts.rejection import accept_sampled  # noqa: E402
from sparseattn.models.drafts.rules import Rules  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache  # noqa: E402
from tests.models.lossless_runs import lossless  # noqa: E402
from tests.models.tiny import prompt, small  # noqa: E402

BEYOND = {6: 22.46, 15: 37.70}  # chi-squared that 1 in 1,000 samples goes beyond, by degrees of freedom


def test_accepted_and_drawn_tokens_are_distributed_as_the_target() -> None:
    """Chi-squared over 10^5 draws: the first token, and the second of those rounds that have one."""
    vocabulary, draws = 7, 100_000
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 3, vocabulary, generator=generator).mul(1.5).softmax(-1)
    q[1, 2] = 0.0  # never drafted
    q[1] /= q[1].sum()
    torch.manual_seed(1)
    drafts = torch.stack([torch.multinomial(q[i], draws, replacement=True) for i in range(2)], 1)
    accepted, tokens = accept_sampled(drafts, q[None, :2].expand(draws, -1, -1), p[None].expand(draws, -1, -1))
    for place in range(3):
        reached = tokens[accepted >= place, place]
        assert len(reached) > 10_000
        assert _distance(reached.bincount(minlength=vocabulary), p[place]) < BEYOND[vocabulary - 1]
    agreement = torch.minimum(p[0], q[0]).sum()
    assert abs((accepted >= 1).double().mean() - agreement) < 0.01
    assert (
        _distance(drafts[:, 0].bincount(minlength=vocabulary), p[0]) > 10 * BEYOND[vocabulary - 1]
    )  # so that the test can fail


def _distance(seen: Tensor, p: Tensor) -> float:
    """Chi-squared of counts `[V]` against probabilities `[V]`."""
    expected = p.double() * seen.sum()
    return float(((seen - expected) ** 2 / expected).sum())


# -- a model -----------------------------------------------------------------------------------------------------------

VOCABULARY, PROMPT, TEMPERATURE = 16, 16, 0.9
FAR = 3.29  # standard deviations that 1 in 1,000 samples goes beyond
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SLIDING: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
    "initializer_range": 0.5,
}
SEVERAL = 3  # sequences of a batch, all of which accept a draft often enough


def llama() -> Any:
    return small("llama", **TINY, num_hidden_layers=1)


def sliding() -> Any:
    """Whose first layer has a window, so that sequences of a batch keep as many drafts as the least of them."""
    return small("qwen2", **TINY, **SLIDING)


def rows(sequences: int, lengths: tuple[int, ...] = (PROMPT,)) -> dict[str, Tensor]:
    """So many times the same prompt, of which the sequences have the last `lengths` tokens by turns."""
    ids = prompt(PROMPT).remainder(VOCABULARY - 1).expand(sequences, -1) + 1
    kept = torch.tensor([lengths[i % len(lengths)] for i in range(sequences)])
    mask = (torch.arange(PROMPT) >= PROMPT - kept[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@dataclass(frozen=True)
class Distance:
    """How far drawn tokens are from full attention's probabilities.

    Args:
        counts: of each token from their expectation, squared, in their covariance: chi-squared of V - 1 degrees of
            freedom.
        likelihood: the sum of the logarithms of what was drawn from its expectation, in standard deviations.
        forbidden: the share of tokens whose probability is 0.
    """

    counts: float
    likelihood: float
    forbidden: float

    @property
    def near(self) -> bool:
        """Whether it may be chance."""
        return not self.forbidden and self.counts < BEYOND[VOCABULARY - 1] and abs(self.likelihood) < FAR

    @property
    def far(self) -> bool:
        """Whether it cannot be."""
        return self.forbidden > 0.01 or self.counts > 2 * BEYOND[VOCABULARY - 1] or abs(self.likelihood) > 2 * FAR


@torch.no_grad()
def _distance_of(model: Any, inputs: dict[str, Tensor], ids: Tensor, top_k: int = 0, top_p: float = 1.0) -> Distance:
    """How far `ids` `[B,T]` behind the prompts `inputs` are from full attention."""
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, PROMPT:])], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parts = zip(ids.split(250), mask.split(250), positions.split(250), strict=True)
    logits = torch.cat([model(x, attention_mask=m, position_ids=at).logits[:, PROMPT - 1 : -1] for x, m, at in parts])
    scores = logits.double().flatten(0, 1) / TEMPERATURE
    logs = scores.log_softmax(-1)
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = transformers.TopPLogitsWarper(top_p)(None, scores)
    p, drawn = scores.softmax(-1), ids[:, PROMPT:].flatten()
    beyond = torch.nn.functional.one_hot(drawn, VOCABULARY).sum(0) - p.sum(0)
    covariance = p.sum(0).diag() - p.T @ p
    expected = (p * logs).sum(-1)
    likelihood = (logs.gather(1, drawn[:, None])[:, 0] - expected).sum()
    variance = ((p * logs**2).sum(-1) - expected**2).sum()
    return Distance(
        float(beyond @ torch.linalg.pinv(covariance, rtol=1e-9, hermitian=True) @ beyond),
        float(likelihood / variance.sqrt()),
        float((p.gather(1, drawn[:, None]) == 0).double().mean()),
    )


def _sampled(
    model: Any,
    inputs: dict[str, Tensor],
    selector: str,
    budget: int | None,
    tokens: int,
    times: int = 1,
    window: int = 1,
    **options: Any,
) -> Distance:
    """Sample `times` times. A sparse step's own samples, of the first prompt, must be far: so that a test can fail."""
    sizes: dict[str, Any] = {"sink": 0, "window": window, "seal": 2}  # what a draft reads: little
    torch.manual_seed(0)
    given = {"do_sample": True, "temperature": TEMPERATURE, "max_new_tokens": tokens} | options
    outs = [lossless(model, inputs, selector, budget, 2, settings=sizes, **given) for _ in range(times)]
    assert all(out.stats.tokens == tokens * len(out.sequences) for out in outs)
    assert sum(out.stats.accepted for out in outs) > 0.1 * sum(out.stats.drafted for out in outs)
    with SparseCache(model, selector, budget, **sizes) as cache:
        many = {name: x[:1].expand(300, -1) for name, x in inputs.items()}
        sparse = model.generate(**many, **cache_argument(cache), **given | {"max_new_tokens": 10})
    assert _distance_of(model, many, sparse, **options).far
    every = {name: x.repeat(times, 1) for name, x in inputs.items()}
    return _distance_of(model, every, torch.cat([out.sequences for out in outs]), **options)


@pytest.mark.parametrize(("sequences", "tokens"), [(300, 30), pytest.param(2_000, 50, marks=pytest.mark.slow)])
def test_samples_of_a_model_are_distributed_as_full_attentions(sequences: int, tokens: int) -> None:
    """Of 9,000 draws, or 10^5, each token is drawn as often as full attention's probabilities, added up, tell."""
    assert _sampled(llama(), rows(sequences), "window", None, tokens).near


@pytest.mark.parametrize(
    ("sequences", "options"),
    [
        (60, {"top_k": 8, "top_p": 0.9}),
        *(pytest.param(1_500, options, marks=pytest.mark.slow) for options in ({}, {"top_k": 5}, {"top_p": 0.7})),
    ],
)
def test_samples_of_padded_batches_and_of_the_likeliest_tokens(sequences: int, options: dict[str, Any]) -> None:
    """Prompts of several lengths, tokens among the likeliest few: others are never drawn."""
    assert _sampled(llama(), rows(sequences, (16, 11, 5)), "quest:page=2", 2, 30, **options).near


@pytest.mark.parametrize(
    ("times", "lengths"),
    [(1, (16, 11, 5)), *(pytest.param(20, n, marks=pytest.mark.slow) for n in ((16,), (16, 11, 5)))],
)
def test_samples_where_the_least_acceptance_is_kept(times: int, lengths: tuple[int, ...]) -> None:
    """Of a model with windows, in small batches: what one sequence rejects cuts the others short too."""
    assert _sampled(sliding(), rows(SEVERAL, lengths), "window", None, 100, times, window=4).near


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drafts", "cut"])
def test_samples_of_faulty_rules_are_far(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each draft is accepted; and where a draft that another sequence's rejection cuts is drawn anew."""
    accept = Rules.accept

    def faulty(self: Rules, drafts: Tensor, proposed: list[Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
        accepted, tokens = accept(self, drafts, proposed, scores)
        if fault == "drafts":
            return torch.full_like(accepted, drafts.shape[1]), torch.cat([drafts, tokens[:, -1:]], 1)
        if (least := int(accepted.min())) < drafts.shape[1]:
            rest = (scores[:, least].softmax(-1) - proposed[least]).clamp(min=0) + 1e-9
            tokens[:, least] = torch.multinomial(rest, 1)[:, 0]
        return accepted, tokens

    monkeypatch.setattr(Rules, "accept", faulty)
    assert _sampled(sliding(), rows(SEVERAL), "window", None, 100, 20, window=4).far
