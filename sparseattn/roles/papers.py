"""Roles of papers: PyramidKV, https://arxiv.org/abs/2406.02069, DuoAttention, https://arxiv.org/abs/2410.10819,
RazorAttention, https://arxiv.org/abs/2407.15891, and TidalDecode, https://arxiv.org/abs/2410.05076."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparseattn.core.budget import Budget, budget_rows
from sparseattn.roles.role import DENSE, WINDOW, Role
from sparseattn.roles.roles import Given, Roles

BLOCK = 64  # queries of a prompt whose weights lie in memory at a time


def pyramid(layers: int, budget: int | float, beta: float = 20, *, unit: int = 1) -> list[int] | list[float]:
    """PyramidKV's budgets (https://arxiv.org/abs/2406.02069): most in the first layer, falling linearly to the last.

    From 2B - B/beta to B/beta, so that their mean is B. Rows are rounded alike above and below the mean, which stays B
    exactly. In the paper B counts no window, as budgets here.

    Args:
        layers: how many.
        budget: B, their mean: rows (int) or a share of the context (float).
        beta: how steep, 1 (all alike) or more; 20 as by default in the authors' code.
        unit: rows are multiples of it, and so is B: the page of a method that reads whole pages.

    Returns:
        A budget for each layer, of `budget`'s type.

    Raises:
        ValueError: an argument out of its range, B that is no multiple of the unit, a last layer below one unit, or a
            first layer above the whole context.
    """
    if layers < 1 or unit < 1 or not (math.isfinite(beta) and beta >= 1):
        raise ValueError(f"layers and unit are 1 or more, and so is beta, got {layers}, {unit} and {beta}")
    budget_rows(budget, 1)
    steps = [1 - 2 * layer / (layers - 1) if layers > 1 else 0.0 for layer in range(layers)]  # 1 to -1
    most = budget - budget / beta  # above the mean
    if isinstance(budget, float):
        if budget + most > 1:
            raise ValueError(
                f"budgets of mean {budget:g} and beta {beta:g} begin at {budget + most:g} of the context: at most 1"
            )
        return [budget + most * step for step in steps]
    if budget % unit:
        raise ValueError(f"budgets in multiples of {unit} rows have a mean of such, got {budget}")
    rows = [budget + unit * int(math.copysign(math.floor(abs(most * step) / unit + 0.5), step)) for step in steps]
    if rows[-1] < unit:
        raise ValueError(
            f"budgets of mean {budget} and beta {beta:g} end at {budget / beta:g} rows, less than the {unit} that are "
            f"read at a time: give more rows or a smaller beta"
        )
    return rows


def duo(
    scores: Mapping[int, Sequence[float]] | Sequence[Sequence[float]] | Tensor,
    threshold: float,
    *,
    retrieval: Given = DENSE,
    streaming: Given = WINDOW,
    name: str = "duo",
) -> Roles:
    """DuoAttention's roles (https://arxiv.org/abs/2410.10819): retrieval heads read every row, streaming heads sink and
    window.

    Args:
        scores: of each KV head of each layer, `[L,H]` or by layer: the paper's gates, 0 to 1, which it optimises on
            passkey prompts (`published_gates`), those of a `HeadProfile` measured on traces, or anything else that
            tells how much a head looks back.
        threshold: a head of a larger score is a retrieval head.
        retrieval, streaming: their roles; the paper's by default. `Role("window", 192)` reads 192 rows more than the
            cache's window.
        name: what tables call it.

    Raises:
        ValueError: no scores of heads, or what `Roles` refuses.
    """
    if isinstance(scores, Tensor):
        scores = scores.tolist()
    each = dict(scores if isinstance(scores, Mapping) else enumerate(scores))
    for layer, heads in each.items():
        if not isinstance(heads, Sequence) or not heads or not all(_is_number(score) for score in heads):
            raise ValueError(
                f"scores are lists of numbers, one for each KV head of a layer, got {reprlib.repr(heads)} for layer "
                f"{layer}"
            )
    made = {layer: [retrieval if score > threshold else streaming for score in heads] for layer, heads in each.items()}
    return Roles(made, name, {"threshold": threshold})


def published_gates(path: str | os.PathLike[str]) -> Tensor:
    """Return the gates `[L,H]`, cut to 0 to 1, of a file as DuoAttention's authors publish for models, a line for each
    layer (`full_attention_heads.tsv` in `attn_patterns` of mit-han-lab/duo-attention); ValueError for another file."""
    lines = [line.split("\t") for line in Path(path).read_text().splitlines() if line.strip()]
    try:
        return torch.tensor([[float(word) for word in line] for line in lines]).reshape(len(lines), -1).clamp(0, 1)
    except ValueError as error:
        raise ValueError(f"{path} is no table of gates, a line for each layer: {error}") from error


def _is_number(score: object) -> bool:
    return isinstance(score, (int, float)) and math.isfinite(score)


def echo_and_induction(queries: Tensor, keys: Tensor, period: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """RazorAttention's scores of heads (https://arxiv.org/abs/2407.15891), on a prompt of random tokens that repeat.

    An echo head looks at earlier places of its own token, an induction head at the tokens behind these. The score is
    the mean weight that later repetitions give to them, of a KV head the largest of its query heads.

    Args:
        queries: `[H,G,N,D]`, after RoPE, of every token of the prompt.
        keys: `[H,N,D]`, after RoPE.
        period: tokens from one repetition to the next; the paper's are 2,500, four times. A first token that marks the
            beginning is left out.
        scale: factor of the logits, default `1/sqrt(D)`.

    Returns:
        The scores `[H]` as echo heads and as induction heads.

    Raises:
        ValueError: a prompt that does not repeat at least once.
    """
    count = keys.shape[1]
    if not 1 <= period < count:
        raise ValueError(f"a prompt of {count} tokens repeats after 1 to {count - 1} of them, got a period of {period}")
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.zeros(2, *queries.shape[:2], device=keys.device)
    place = torch.arange(count, device=keys.device)
    for first in range(period, count, BLOCK):
        asking = place[first : first + BLOCK]
        logits = queries[:, :, first : first + BLOCK].float() @ keys[:, None].float().mT * scale
        weights = logits.masked_fill(place > asking[:, None], -math.inf).softmax(-1)  # [H,G,m,N]
        behind = asking[:, None] - place
        for of, shift in zip(scores, (0, 1), strict=True):
            hit = ((behind + shift) % period == 0) & (behind + shift > 0) & (behind >= 0) & (place >= shift)
            of += (weights * hit).sum((-2, -1))
    echo, induction = (scores / (count - period)).amax(2)
    return echo, induction


def razor(
    echo: Tensor,
    induction: Tensor,
    *,
    echoes: float = 0.01,
    inductions: float = 0.14,
    retrieval: Given = DENSE,
    local: Given = "razor",
    name: str = "razor",
) -> Roles:
    """RazorAttention's roles (https://arxiv.org/abs/2407.15891): a few heads read every row, the others are local.

    Args:
        echo, induction: scores of all KV heads, `[L,H]`, see `echo_and_induction`.
        echoes, inductions: shares of all heads that retrieve, by each score; the paper's by default.
        retrieval, local: their roles; `Role("razor", 0.2)` has the paper's fifth of the rows.
        name: what tables call it.

    Raises:
        ValueError: scores of other shapes, or a share outside 0 to 1.
    """
    if echo.dim() != 2 or echo.shape != induction.shape:
        raise ValueError(f"scores are [L,H] both, got {list(echo.shape)} and {list(induction.shape)}")
    chosen = torch.zeros(echo.shape, dtype=torch.bool)
    for scores, share in ((echo, echoes), (induction, inductions)):
        if not 0 <= share <= 1:
            raise ValueError(f"a share of the heads is 0 to 1, got {share}")
        best = scores.flatten().cpu().topk(round(share * scores.numel())).indices
        chosen.view(-1)[best] = True
    made = {
        layer: [retrieval if retrieves else local for retrieves in heads] for layer, heads in enumerate(chosen.tolist())
    }
    return Roles(made, name, {"echoes": echoes, "inductions": inductions})


def tidaldecode(
    layers: int,
    budget: Budget = None,
    first: int = 2,
    again: int = 13,
    *,
    group: str = "each",
    name: str = "tidaldecode",
) -> Roles:
    """TidalDecode's roles (https://arxiv.org/abs/2410.05076): dense first layers, two layers that attend to every row
    and rank them, and others that read the rows ranked first.

    Facts are from the authors' code (DerrickYLJ/TidalDecode, `src/tidal_build/modify_llama.py`). There rows are ranked
    among all; here sink and window are read in any case. A layer that ranks rows counts as scoring each key once more.

    Args:
        layers: how many the model has.
        budget: rows that the others read; None: the budget that is asked for where the roles are used.
        first: the layer that ranks first; those before it are dense. 2 in the authors' code.
        again: the layer that ranks again; 13 in their runs of Llama 3 8B. A model without such a layer ranks once.
        group: how the heads of a KV head rank, see `Exact`: each for itself in the paper; "layer" is OmniKV's one list.
        name: what tables call it.

    Raises:
        ValueError: layers that are not there or not in this order.
    """
    if not 0 <= first < min(again, layers):
        raise ValueError(f"of {layers} layers, first is 0 or more, and again is a later layer, got {first} and {again}")
    anchors = [first, again] if again < layers else [first]
    method = f"kascade:anchors=[{','.join(map(str, anchors))}],inner=[exact:group={group}]"
    each = {layer: Role(method, "all" if layer in anchors else budget) for layer in range(first, layers)}
    return Roles({**dict.fromkeys(range(first), DENSE), **each}, name, {"first": first, "again": again})
