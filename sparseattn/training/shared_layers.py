"""IndexCache's search: which layers of a model can read another layer's choice, by the loss of its predictions.

https://arxiv.org/abs/2603.12201
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparseattn.core.budget import Budget
from sparseattn.selectors.combined.indexcache import FULL, SHARED, IndexCache

if TYPE_CHECKING:
    from sparseattn.evaluation.tasks.decoder import ModelDecoder


class Found(NamedTuple):
    """A step of the search.

    Args:
        pattern: a letter for each layer, see `IndexCache`.
        loss: with this pattern.
        layer: which became shared at this step.
    """

    pattern: str
    loss: float
    layer: int


def greedy(
    loss: Callable[[str], float],
    layers: int,
    shared: int,
    choosing: Iterable[int] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Found]:
    """Share one layer after the other, that with which the loss is least; the first that chooses stays full.

    That is the paper's training-free search as its abstract and a third party's code have it (eigendash/indexcache-mlx,
    `indexcache/greedy.py`, which names the paper's Algorithm 1). Of equal losses the lower layer is shared.

    Args:
        loss: of a pattern, on the same tokens each time.
        layers: how many the model has.
        shared: how many of those that choose are shared in the end; the paper shares three of four.
        choosing: layers that choose, rising; None: all. Others are dense: theirs are S behind the first that chooses.
        progress: called with how many losses are known, and of how many.

    Returns:
        Every step, so that a pattern can be taken by its loss.

    Raises:
        ValueError: more shared layers than there are behind the first.
    """
    able = list(range(layers)) if choosing is None else list(choosing)
    if not 0 <= shared < len(able):
        raise ValueError(f"of {len(able)} layers that choose, 0 to {len(able) - 1} can be shared, got {shared}")
    letters = [FULL if layer in able or layer < able[0] else SHARED for layer in range(layers)]
    total = sum(len(able) - 1 - step for step in range(shared))
    chosen: list[Found] = []
    known = 0
    for _ in range(shared):
        best: Found | None = None
        for layer in able[1:]:
            if letters[layer] == SHARED:
                continue
            pattern = "".join([*letters[:layer], SHARED, *letters[layer + 1 :]])
            trial = Found(pattern, loss(pattern), layer)
            known += 1
            progress(known, total)
            if best is None or trial.loss < best.loss:
                best = trial
        assert best is not None
        letters = list(best.pattern)
        chosen.append(best)
    return chosen


def shared_layers(
    model: Any,
    windows: Sequence[Sequence[int]],
    shared: int,
    *,
    inner: str = "exact:group=layer",
    budget: Budget = 256,
    last: int = 16,
    sink: int = 4,
    window: int = 64,
    dense_layers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Found]:
    """Search patterns for a causal LM of transformers, by its mean loss on the last tokens of each window.

    A window is read densely but for its last tokens, which are decoded by `inner` in full layers, its choice in shared
    ones. The paper's loss is of whole sequences, since its prefill is sparse too.

    Args:
        model: as `load_model` gives it.
        windows: tokens, each window one sequence, the same for every pattern.
        shared, progress: see `greedy`.
        inner: what full layers choose by.
        budget, sink, window: as in `SparseCache`.
        last: tokens of each window that are predicted.
        dense_layers: first layers that stay dense.

    Raises:
        ValueError: no windows, or one that is too short; what `greedy` refuses.
    """
    from sparseattn.evaluation.tasks.decoder import ModelDecoder

    short = [len(tokens) for tokens in windows if len(tokens) < last + 2]
    if not windows or short:
        raise ValueError(f"a window has {last} tokens to predict and 2 before them, or more, got {short or 'none'}")
    decoder = ModelDecoder(model, sink=sink, window=window, dense_layers=dense_layers)
    loss = ModelLoss(decoder, windows, inner, budget, last)
    return greedy(loss, decoder.config.num_hidden_layers, shared, decoder.sparse, progress)


class ModelLoss:
    """The mean negative log-likelihood of the last tokens of windows, with a pattern; each window is prefilled once.

    Args: see `shared_layers`.
    """

    def __init__(
        self, decoder: ModelDecoder, windows: Sequence[Sequence[int]], inner: str, budget: Budget, last: int
    ) -> None:
        self.decoder, self.inner, self.budget, self.last = decoder, inner, budget, last
        self.read = [(decoder.read(tokens[: -last - 1]), list(tokens[-last - 1 :])) for tokens in windows]

    def __call__(self, pattern: str) -> float:
        total = 0.0
        for prefill, tokens in self.read:
            indexed = self.decoder.index(prefill, [], IndexCache(pattern, self.inner))
            logits = self.decoder.start(indexed, self.budget).feed(tokens[:-1])
            logs = logits.double().log_softmax(-1)
            total -= sum(float(row[token]) for row, token in zip(logs, tokens[1:], strict=True))
        return total / (self.last * len(self.read))
