"""Layers that read the choice of another, as TidalDecode and IndexCache have them, beside each rule in loops."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, IndexCache, KVCache, evaluate, make_selector
from sparseattn.core.context import LayerContext
from sparseattn.core.layer_choices import Board
from sparseattn.roles.papers import tidaldecode
from sparseattn.traces.trace import Trace
from sparseattn.training.shared_layers import greedy
from tests.cases import attention, heads
from tests.selectors.test_kascade import TOKENS, G, H
from tests.selectors.test_kascade import trace as trace


@pytest.mark.parametrize("data", [heads, attention])
def test_tidaldecodes_layers(data: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    """DerrickYLJ/TidalDecode, src/tidal_build/modify_llama.py:76-129: dense before the first layer that selects, full
    attention where rows are selected (:110-114), the last selection's rows elsewhere (:116-122)."""
    layers, rows, budget, board = 7, 120, 11, Board()
    roles = tidaldecode(layers, budget, 2, 5)
    asked, selected, same = 20, None, 0
    made = [data(1, H, G, rows, 16) for _ in range(layers)]
    made = [tuple(part.roll(layer, -1) for part in one) for layer, one in enumerate(made)]  # layers that differ
    caches = []
    for layer, (queries, keys, values) in enumerate(made):
        role = roles.layers[layer]
        cache = KVCache(role.selector.for_layer(LayerContext(layer, board=board)), sink=0, window=0, seal=16)
        cache.append(keys, values, queries)
        caches.append((role, cache))
    for t in range(rows - asked, rows):
        for layer, (role, cache) in enumerate(caches):
            queries, keys, _ = made[layer]
            chosen = cache.select(queries[:, :, :, t], "all" if role.method == "dense" else role.budget)
            sealed = int(cache.sealed[0])
            weights = (queries[0, :, :, t].double() @ keys[0, :, :sealed].double().mT).flatten(0, 1)
            expected = torch.ones_like(weights, dtype=torch.bool)
            if layer in (2, 5):
                selected = torch.zeros_like(expected).scatter_(1, weights.topk(budget).indices, True)
            elif layer > 2:
                expected = selected
            found = chosen.mask(sealed)[0]
            found = found if len(found) == len(expected) else found.repeat_interleave(G, 0)
            same += int((found == expected).all(-1).sum())
    assert same == asked * layers * H * G


def test_tidaldecode_in_comparisons(trace: Trace) -> None:
    with pytest.raises(ValueError, match="first is 0 or more, and again is a later layer, got 2 and 2"):
        tidaldecode(4, 8, 2, 2)
    roles = tidaldecode(8, 32, 4, 6)
    found = evaluate(trace, roles, 8, last=2)
    attended = found.heads["attended"].unflatten(1, (H, G))[:, 0, 0].tolist()  # layers 1, 4, 5, 6
    assert attended[0] == attended[1] == attended[3] == TOKENS - 0.5
    assert attended[2] < 32 + 4 + 64 + 64
    torch.testing.assert_close(found.heads["recovered"][[0, 1, 3]], torch.ones(3, H * G, dtype=torch.float64))


@pytest.mark.parametrize("pattern", ["FSSSFSFS", 3])
def test_indexcache_reads_the_nearest_full_layer(trace: Trace, pattern: str | int) -> None:
    """THUDM/IndexCache, indexcache.patch: `skip_topk`, by letters or by `max(layer - 1, 0) % freq`."""
    made = IndexCache(pattern)
    for layer in range(8):
        skips = [max(i - 1, 0) % pattern != 0 if isinstance(pattern, int) else pattern[i] == "S" for i in range(8)]
        nearest = max(i for i in range(layer + 1) if not skips[i])
        assert made.for_layer(layer).follows == (None if nearest == layer else nearest)
    short = IndexCache("FFSSFSFS")
    assert make_selector(str(short)).pattern == "FFSSFSFS"
    found, own = (evaluate(trace, one, 32, last=2) for one in (short, Exact("layer")))
    torch.testing.assert_close(found.heads["recovered"][[0, 1, 3]], own.heads["recovered"][[0, 1, 3]])
    assert found.heads["scanned"][2].tolist() == [0] * (H * G)


def test_what_indexcache_refuses() -> None:
    for wrong in ("SFF", "", "FXS", 0, True):
        with pytest.raises(ValueError, match="pattern"):
            IndexCache(wrong)
    with pytest.raises(ValueError, match="letters for 3 layers, and the model has 8"):
        IndexCache("FSF").for_layer(LayerContext(2, 8)).check_shape(2, 1, 16)


def test_the_greedy_search_shares_the_layer_that_costs_least() -> None:
    """eigendash/indexcache-mlx, indexcache/greedy.py:59-84, of the paper's Algorithm 1: the first stays full."""
    draw = random.Random(0)
    losses = {"".join(letters): draw.random() for letters in itertools.product("FS", repeat=6)}
    found = greedy(losses.__getitem__, 6, 5)
    pattern = ["F"] * 6
    for step in found:
        full = [layer for layer in range(1, 6) if pattern[layer] == "F"]
        least, layer = min((losses["".join([*pattern[:i], "S", *pattern[i + 1 :]])], i) for i in full)
        pattern[layer] = "S"
        assert (step.pattern, step.loss, step.layer) == ("".join(pattern), least, layer)
    assert found[-1].pattern == "FSSSSS"
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match="of 6 layers that choose, 0 to 5 can be shared"):
            greedy(losses.__getitem__, 6, wrong)


def test_the_search_in_a_model() -> None:
    """The loss of a pattern is that of its tokens as the model's own pass predicts them where nothing is left out, and
    the search takes the flip of least loss."""
    pytest.importorskip("transformers")
    from sparseattn.evaluation.tasks.decoder import ModelDecoder
    from sparseattn.training.shared_layers import ModelLoss, shared_layers
    from tests.models.tiny import prompt, random_model

    model = random_model("llama", num_hidden_layers=4)
    windows = [prompt(60, seed=seed)[0].tolist() for seed in (1, 2)]
    expected = []
    for tokens in windows:
        with torch.no_grad():
            logs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        expected += [-float(logs[at - 1, tokens[at]]) for at in range(55, 60)]
    decoder = ModelDecoder(model, sink=2, window=3, dense_layers=1)
    whole = ModelLoss(decoder, windows, "exact:group=layer", None, 5)
    assert whole("FFSS") == pytest.approx(sum(expected) / 10, abs=1e-4)
    found = shared_layers(model, windows, 2, budget=4, last=5, sink=2, window=3, dense_layers=1)
    few = ModelLoss(decoder, windows, "exact:group=layer", 4, 5)
    flips = {pattern: few(pattern) for pattern in ("FFSF", "FFFS")}
    assert found[0].pattern == min(flips, key=flips.__getitem__)
    assert found[0].loss == pytest.approx(min(flips.values()))
    assert found[1].pattern == "FFSS"
    assert len({*flips.values(), found[1].loss}) == 3, "patterns differ"
    with pytest.raises(ValueError, match="2 before them, or more, got none"):
        shared_layers(model, [], 1)
