"""Fits an index of keys to the attention of a model as it is: maps that `hata` and `indexer` code keys by, the networks
of `hashattention`, and the codebooks of `querypq` once more. `block_gate` has the gate of `seer`.

One loop serves all. A step draws queries of one prompt and keys before them, and lowers the cross entropy of the
attention among these keys, from the scores that the codes give. What is rounded to codes passes its gradient on as if
it were not (straight through, https://arxiv.org/abs/1308.3432). `hata` can be fitted by its paper's loss instead.

Letters: H KV heads, G query heads per KV head, D head size, q queries and n keys of a step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.hash_networks import KEYS as KEY_PARTS
from sparseattn.selectors.parameters.hash_networks import QUERIES as QUERY_PARTS
from sparseattn.selectors.parameters.hash_networks import first_network, through
from sparseattn.selectors.parameters.query_metric import as_coded
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.hashing import stream

QUERIES, KEYS = 48, 2560  # of a step
SINK, NEAR = 4, 64  # first tokens, and tokens before the query, that no index is asked for
LEAST = 256  # tokens of a prompt
FIRST = 0.125  # share of a prompt before which no query is drawn


@dataclass(frozen=True)
class PromptLayer:
    """What a layer of one prompt is fitted to.

    Args:
        query: `[H,G,Q,D]` of the prompt's last Q tokens, after RoPE.
        keys: `[H,T,D]` float32, after RoPE.
        scale: logits are `scale * q.k`.
        rope: of the layer, for what takes keys before it; None: not known.
        positions: `[T]` of the tokens, likewise.
    """

    query: Tensor
    keys: Tensor
    scale: float
    rope: Rope | None = None
    positions: Tensor | None = None


@dataclass(frozen=True)
class DrawnQueries:
    """A step's queries `[H,G,q,D]` and keys `[H,n,D]` float32, which keys each query may attend to `[q,n]` bool, and
    how its attention among these is shared out, `[H,G,q,n]`. at: `[n]`, positions of the keys; None: not known."""

    query: Tensor
    keys: Tensor
    seen: Tensor
    attention: Tensor
    scale: float
    at: Tensor | None = None


class Index(ABC):
    """An index that is fitted: its parameters, and the scores that it gives."""

    parameters: dict[str, Tensor]

    def draw(self, prompt: PromptLayer, draws: torch.Generator) -> Any:
        """Return what `loss` takes."""
        return draw(prompt, draws)

    @abstractmethod
    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return `[H,G,q,n]`, logits of keys for queries by their codes."""

    def scores_of(self, drawn: DrawnQueries) -> Tensor:
        """Return `scores` of what was drawn."""
        return self.scores(drawn.query, drawn.keys)

    def loss(self, drawn: DrawnQueries) -> Tensor:
        """Return what a step lowers: the cross entropy of the attention from the scores, in nats."""
        scores = self.scores_of(drawn).masked_fill(~drawn.seen, torch.finfo(torch.float32).min)
        return -(drawn.attention * scores.log_softmax(-1)).sum(-1).mean()

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        """Return what moves the parameters, at this highest learning rate."""
        return torch.optim.Adam(self.parameters.values(), rate)

    @abstractmethod
    def found(self) -> dict[str, Tensor]:
        """Return what a file holds."""


def fit(
    index: Index,
    prompts: Sequence[PromptLayer],
    steps: int,
    rate: float,
    seed: Sequence[int | str],
    step: Callable[[], None] = lambda: None,
) -> float:
    """Fit an index to prompts drawn in turns, and return the mean loss of the last tenth of the steps.

    Args:
        rate: highest learning rate; it rises in the first third and falls to nothing.
        seed: of what is drawn.
        step: called after every step.
    """
    with torch.enable_grad():
        for part in index.parameters.values():
            part.requires_grad_()
        optimizer = index.optimizer(rate)
        highest = [group["lr"] for group in optimizer.param_groups]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, highest, total_steps=steps, cycle_momentum=False)
        losses = []
        for number in range(steps):
            loss = index.loss(index.draw(prompts[number % len(prompts)], stream(*seed, number)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            step()
    if not math.isfinite(sum(losses)):
        raise TrainingError(f"the loss is not finite after {steps} steps at the rate {rate}: give a smaller rate")
    last = losses[-max(steps // 10, 1) :]
    return sum(last) / len(last)


def draw(prompt: PromptLayer, draws: torch.Generator) -> DrawnQueries:
    """Return a step's queries and keys: queries behind the first eighth of a prompt, keys anywhere."""
    tokens, asking = prompt.keys.shape[1], prompt.query.shape[2]
    first = max(tokens - asking, min(int(FIRST * tokens) + SINK + NEAR + 1, tokens - 1))
    at = torch.randint(first, tokens, (min(QUERIES, tokens - first),), generator=draws)
    which = torch.randperm(tokens, generator=draws)[:KEYS].sort().values
    query = prompt.query[:, :, at - (tokens - asking)].to(prompt.keys.device).float()
    keys = prompt.keys[:, which.to(prompt.keys.device)]
    seen = ((which >= SINK) & (which <= at[:, None] - NEAR)).to(keys.device)
    logits = (prompt.scale * query @ keys[:, None].mT).masked_fill(~seen, -torch.inf)
    places = None if prompt.positions is None else prompt.positions[which.to(prompt.positions.device)]
    return DrawnQueries(query, keys, seen, logits.softmax(-1).nan_to_num(0.0), prompt.scale, places)


class Rounded(torch.autograd.Function):
    """Numbers as codes keep them, with the gradient of the numbers themselves where codes can follow it."""

    @staticmethod
    def forward(ctx, x: Tensor, rounded: Tensor, follows: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(follows)
        return rounded

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (follows,) = ctx.saved_tensors
        return gradient * follows, None, None


def rounded(x: Tensor, as_kept: Tensor, follows: Tensor) -> Tensor:
    """Return `as_kept` of the shape of `x`, whose gradient is that of `x` times `follows`."""
    as_read: Tensor = Rounded.apply(x, as_kept, follows)
    return as_read


class HashCodes(Index):
    """Signs of products with directions, as `Hata` has them; scores are their agreement times a learned factor."""

    def __init__(self, heads: int, size: int, bits: int, draws: torch.Generator) -> None:
        self.parameters = {
            "directions": torch.randn(heads, size, bits, generator=draws) / size**0.5,
            "factor": torch.full((heads,), math.log(8 / bits)),
        }

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        directions, factor = self.parameters["directions"], self.parameters["factor"].exp()
        query_signs, kept = (_signs(x) for x in (query @ directions[:, None], keys @ directions))
        return query_signs @ kept[:, None].mT * factor[:, None, None, None]

    def found(self) -> dict[str, Tensor]:
        return {"directions": self.parameters["directions"].detach()}


def _signs(x: Tensor) -> Tensor:
    """Signs, whose gradient fades where a number is far from both."""
    spread = x.detach().square().mean((-2, -1), keepdim=True).sqrt().clamp(min=1e-6)
    return rounded(x, torch.where(x > 0, 1.0, -1.0), 1 - torch.tanh(x.detach() / spread).square())


class HashNetworks(Index):
    """Signs of what networks make of keys and of each query head's queries, as `HashAttention` has them."""

    def __init__(self, layer: PromptLayer, bits: int, draws: torch.Generator) -> None:
        heads, group, _, size = layer.query.shape
        self.parameters = first_network(KEY_PARTS, (heads,), size, bits, draws)
        self.parameters |= first_network(QUERY_PARTS, (heads, group), size, bits, draws)
        for name, seen in ((KEY_PARTS[0], layer.keys), (QUERY_PARTS[0], layer.query)):
            self.parameters[name] /= float(seen.float().square().mean().sqrt())  # numbers of about 1 go in
        self.parameters["factor"] = torch.full((heads,), math.log(8 / bits))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        query_signs = _signs(through(query, [self.parameters[name] for name in QUERY_PARTS]))
        kept = _signs(through(keys, [self.parameters[name] for name in KEY_PARTS]))
        return query_signs @ kept[:, None].mT * self.parameters["factor"].exp()[:, None, None, None]

    def found(self) -> dict[str, Tensor]:
        return {name: part.detach() for name, part in self.parameters.items() if name != "factor"}


class HashByLabels(HashCodes):
    """The same codes, fitted by the loss of the paper's code (gpzlx1/HATA, tasks/hash/learn_hash_weights.py): the best
    tenth of the keys is to have near codes, the better the nearer, the others far ones; bits are to be balanced and
    directions at right angles."""

    EPSILON, SIGMA, BEST, REST = 0.01, 0.1, 20.0, -1.0  # of its code: labels of the best tenth fall to 1

    def __init__(self, heads: int, size: int, bits: int, draws: torch.Generator) -> None:
        self.parameters = {"directions": torch.randn(heads, size, bits, generator=draws)}

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters.values(), rate, momentum=0.9, weight_decay=1e-6)

    def loss(self, drawn: DrawnQueries) -> Tensor:
        directions = self.parameters["directions"]
        bits, many = directions.shape[2], drawn.seen.sum()
        coded_query, kept = (
            2 * torch.sigmoid(self.SIGMA * x) - 1 for x in (drawn.query @ directions[:, None], drawn.keys @ directions)
        )
        apart = (
            coded_query.square().sum(-1)[..., None]
            + kept.square().sum(-1)[:, None, None]
            - 2 * coded_query @ kept[:, None].mT
        )
        labels = self.labels(drawn)
        attraction = self.EPSILON * (labels * apart * drawn.seen).sum() / many
        balance = (coded_query.mean((1, 2)) + kept.mean(1)) / bits
        crossed = directions.mT @ directions - torch.eye(bits, device=directions.device)
        return attraction + balance.square().sum() + torch.linalg.vector_norm(crossed)

    def labels(self, drawn: DrawnQueries) -> Tensor:
        """Return `[H,G,q,n]`: 20 for the best key, falling to 1 at the last of the best tenth; -1 for the others."""
        best = (drawn.seen.sum(-1).clamp(min=10) // 10)[:, None]  # [q,1]
        rank = drawn.attention.argsort(-1, descending=True).argsort(-1)
        falling = self.BEST - (self.BEST - 1) * rank / (best - 1).clamp(min=1)
        return torch.where(rank < best, falling, self.REST)


class ProductBooks(Index):
    """The centroids of `QueryPQ`'s codes and its map of queries; which centroid stands for a key is the nearest.

    Args:
        codes: see `codes_of`; with root, the mean key before RoPE, where codes leave it out.
        scale: logits are `scale * q.k`.
        rope: of the layer, which turns that mean.
    """

    def __init__(self, codes: dict[str, Tensor], scale: float, rope: Rope | None = None) -> None:
        self.codes, self.scale, self.rope = codes, scale, rope
        self.parameters = {name: codes[name].clone() for name in ("back", "centroids")}

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        sizes = {name: float(part.detach().abs().mean()) for name, part in self.parameters.items()}
        return torch.optim.Adam(
            [{"params": [part], "lr": rate * sizes[name]} for name, part in self.parameters.items()]
        )

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        turned = (keys - self.codes["centre"][:, None]) @ self.codes["turn"].mT
        kept = as_coded(turned, self.parameters["centroids"])
        return self.scale * (query @ self.parameters["back"][:, None].mT) @ kept[:, None].mT

    def scores_of(self, drawn: DrawnQueries) -> Tensor:
        if self.rope is None or "root" not in self.codes:
            return super().scores_of(drawn)
        if drawn.at is None:
            raise ValueError("codes without the mean before RoPE need the positions of keys, which are not known")
        mean = self.rope.turn(self.codes["root"][:, None].expand(drawn.keys.shape), drawn.at)  # [H,n,D]
        return self.scores(drawn.query, drawn.keys - mean) + self.scale * drawn.query @ mean[:, None].mT

    def found(self) -> dict[str, Tensor]:
        return self.codes | {name: part.detach() for name, part in self.parameters.items()}


class LowDimensions(Index):
    """Images of keys in few dimensions, in four bits each, as `Indexer` has them.

    Keys are taken less the first prompt's mean, which adds the same to every row's score, and over one spread for all
    heads, so that rates suit any model.
    """

    def __init__(self, layer: PromptLayer, dimensions: int, draws: torch.Generator) -> None:
        heads, group, _, size = layer.query.shape
        self.mean, self.scale = layer.keys.mean(1, keepdim=True), layer.scale
        self.spread = max(float((layer.keys - self.mean).square().mean().sqrt()), 1e-6)
        turn = torch.randn(heads, size, dimensions, generator=draws) / size**0.5
        self.parameters = {
            "keys": turn,  # their images are about 1
            "queries": turn[:, None].repeat(1, group, 1, 1) * (size / dimensions),
            "far": torch.full((heads, dimensions), math.log(2.5)),
        }

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        image = ((keys - self.mean) / self.spread) @ self.parameters["keys"]
        far = self.parameters["far"].exp()[:, None]
        code = ((image.detach() / far + 1) * 7.5).round().clamp(0, 15)
        inside = (image.detach().abs() <= far.detach()).to(image.dtype)
        kept = rounded(image, torch.zeros_like(image), inside) + (code / 7.5 - 1) * far
        return self.scale * self.spread * (query @ self.parameters["queries"]) @ kept[:, None].mT

    def found(self) -> dict[str, Tensor]:
        keys, queries, far = (self.parameters[name].detach() for name in ("keys", "queries", "far"))
        keys, far = keys / self.spread, far.exp()
        low = (self.mean @ keys)[:, 0] - far
        return {"keys": keys, "queries": queries * self.spread, "low": low, "step": far / 7.5}
