"""Fits the classifiers of some heads of a layer, all at once; Saap, https://arxiv.org/abs/2502.08246, section 4.2.

Letters: A classifiers (KV heads, or query heads), D head size, C buckets. No number of a head depends on another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.saap_partition import Classifier
from sparseattn.training.classifier import QueryClassifier, clip_each, divergence
from sparseattn.training.examples import Pool, members_of, place_of
from sparseattn.training.partial import Partial, Progress
from sparseattn.training.recipe import Recipe, TrainingError
from sparseattn.training.validation import Held, classifier_scores, recovered


class Fit:
    """The classifiers of some heads of a layer, in training.

    Attributes:
        best_loss, best_step: per head, of the validation whose weights are kept.

    Args:
        linear: `[H,C,D]` what the residual variant's linear path begins as: the logit of a bucket's mean key, averaged
            over far distances.
    """

    def __init__(
        self,
        layer: int,
        heads: Sequence[int],
        group: int,
        linear: Tensor,
        recipe: Recipe,
        pool: Pool,
        held: Held,
    ) -> None:
        assert recipe.clusters is not None
        self.layer, self.heads, self.recipe, self.pool, self.held = layer, list(heads), recipe, pool, held
        members = members_of(group, recipe.per_query_head)
        self.width = len(members)
        self.places: list[tuple[int | str, ...]] = [
            (recipe.seed, layer, *place_of(head, some)) for head in heads for some in members
        ]
        skip = linear.repeat_interleave(self.width, 0) if recipe.residual else None  # [A,C,D]
        self.model = QueryClassifier(self.places, linear.shape[-1], recipe.hidden, recipe.clusters, skip)
        self.model.to(linear.device)
        decayed = [p for p in self.model.parameters() if p.ndim == 3]
        others = [p for p in self.model.parameters() if p.ndim != 3]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}], lr=recipe.rate
        )
        self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.best_score = [-math.inf] * len(heads)
        self.best_loss = [math.inf] * len(heads)
        self.best_step = [0] * len(heads)
        self.stale = [0] * len(heads)
        self.stopped = [0] * len(heads)  # step at which a head had no patience left, 0: not yet
        self.step = 0

    def run(
        self, folder: Partial, save_every: int, progress: Callable[[Progress], None]
    ) -> tuple[Classifier, list[int]]:
        """Train to the last step, or until every head has stopped; return the best weights of each, and its steps.

        Raises:
            TrainingError: a head diverged before it had a validation to keep.
        """
        path = folder.state(self.layer, self.heads)
        if path.exists():
            self._restore(*folder.read(path))
        while self.step < self.recipe.steps and not all(self.stopped):
            loss = self.advance()
            if self.step % self.recipe.validate == 0 or self.step == self.recipe.steps:
                self._validate()
            if self.step % save_every == 0 and self.step < self.recipe.steps:
                folder.write(path, *self._state())
            if self.step % 10 == 0 or self.step == self.recipe.steps:
                best = [score for score in self.best_score if score > -math.inf]
                mean = sum(best) / len(best) if best else None
                progress(Progress(self.layer, "classifier", self.step, self.recipe.steps, float(loss.mean()), mean))
        self.model.load_state_dict(self.best)
        return self.model.folded(), [stopped or self.step for stopped in self.stopped]

    def advance(self) -> Tensor:
        """Take one step and return `[A]` losses."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(self.step)
        self.model.train()
        queries, target, entropy = self.pool.batch(self.places, self.step, recipe.batch)
        losses = divergence(self.model(queries), target, recipe.reverse, entropy)
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        clip_each(list(self.model.parameters()))
        self.optimizer.step()
        self.step += 1
        return losses.detach()

    @torch.no_grad()
    def _validate(self) -> None:
        """Keep the weights of heads that recover more of the far mass of held-out tokens, and count the others'.

        Logits of NaN still come in some order, which may recover more than a better one: a loss that is not finite
        never counts as better.

        Raises:
            TrainingError: a head diverged before it had a validation to keep.
        """
        folded = self.model.folded()
        score = recovered(classifier_scores(folded, self.held.queries), self.held).mean((1, 2, 3)).tolist()
        logits = folded.logits(self.held.queries.reshape(len(self.places), -1, self.held.queries.shape[-1]))
        target = self.held.mass.reshape(len(self.places), -1, self.held.mass.shape[-1])
        loss = divergence(logits, target, self.recipe.reverse).view(len(self.heads), -1).mean(1).tolist()
        now = self.model.state_dict()
        for i in range(len(self.heads)):
            if self.stopped[i]:
                continue
            finite = math.isfinite(score[i]) and math.isfinite(loss[i])
            if not finite and self.best_score[i] == -math.inf:
                raise TrainingError(
                    f"layer {self.layer}, head {self.heads[i]} diverged: after {self.step} steps its loss on held-out "
                    f"tokens is {loss[i]}; lower --rate (given {self.recipe.rate:g}) or --decay (given "
                    f"{self.recipe.decay:g})"
                )
            if finite and score[i] > self.best_score[i]:
                self.best_score[i], self.best_loss[i], self.best_step[i] = score[i], loss[i], self.step
                self.stale[i] = 0
                rows = slice(i * self.width, (i + 1) * self.width)
                for name, tensor in self.best.items():
                    tensor[rows] = now[name][rows]
            else:
                self.stale[i] += 1
                if self.stale[i] >= self.recipe.patience:
                    self.stopped[i] = self.step

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"now/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state[parameter]
            tensors[f"mean/{name}"] = moments["exp_avg"]
            tensors[f"square/{name}"] = moments["exp_avg_sq"]
        facts = {name: getattr(self, name) for name in self._COUNTERS}
        for name in self._UNMEASURED:  # JSON has no infinity
            facts[name] = [value if math.isfinite(value) else None for value in facts[name]]
        return tensors, facts

    _COUNTERS = ("step", "best_loss", "best_step", "stale", "stopped", "best_score")
    _UNMEASURED: ClassVar = {"best_loss": math.inf, "best_score": -math.inf}  # what stands before the first validation

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        for name in self._COUNTERS:
            setattr(self, name, facts[name])
        for name, start in self._UNMEASURED.items():
            setattr(self, name, [start if value is None else value for value in facts[name]])
        device = self.best["w1"].device
        self.model.load_state_dict({name: tensors[f"now/{name}"] for name in self.best})
        self.best = {name: tensors[f"best/{name}"].to(device) for name in self.best}
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step)),
                "exp_avg": tensors[f"mean/{name}"].to(device),
                "exp_avg_sq": tensors[f"square/{name}"].to(device),
            }


def over_distances(keys: Tensor, rope: Rope | None, distances: Tensor) -> Tensor:
    """`[H,C,D]` whose product with a de-roped query is that of roped query and keys, in the mean over distances.

    Pairs that turn fast average out. Left in, as they are in the product of de-roped vectors, they are noise: in the
    reference model's layer 1 they take symmetric k-means from 0.63 of the far mass to 0.56.
    """
    if rope is None:
        return keys
    return rope.scaling * torch.stack([rope.rotate(keys, -distance) for distance in distances]).mean(0)
