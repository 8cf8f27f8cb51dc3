"""Generate the tokens of full attention sooner: sparse steps draft, one pass of full attention checks several.

    out = generate_lossless(model, ids, "lowbit", 256, draft=4, max_new_tokens=100)
    out = model.generate(ids, custom_generate=Lossless("lowbit", 256), max_new_tokens=100)

Speculative decoding (https://arxiv.org/abs/2211.17192) whose draft is the model itself with a sparse cache, as in
TriForce (https://arxiv.org/abs/2404.11912), MagicDec (https://arxiv.org/abs/2408.11049) and SparseSpec
(https://arxiv.org/abs/2512.01278): no second model, and one cache for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.budget import Budget
from sparseattn.models.cache_argument import cache_in
from sparseattn.models.drafts.checks import (
    check_cache,
    check_frequencies,
    check_given,
    check_processors,
    check_request,
)
from sparseattn.models.drafts.length import AutoLength, DraftLength, FixedLength
from sparseattn.models.drafts.loop import DraftLoop
from sparseattn.models.drafts.rules import Rules
from sparseattn.models.drafts.shared_clock import SharedLength, groups_of
from sparseattn.models.drafts.stats import LosslessStats
from sparseattn.models.input_device import input_device
from sparseattn.models.sparse_cache import Method, PerLayer, SparseCache
from sparseattn.models.transformers_classes import StoppingCriteriaList, StopStringCriteria

__all__ = ["Lossless", "LosslessOutput", "LosslessStats", "generate_lossless"]

MOST_DRAFTS = 16
ROUNDING = 4.0  # units of the dtype's rounding within which two scores tie


@dataclass(frozen=True)
class LosslessOutput:
    """What `generate_lossless` returns.

    Args:
        sequences: `[B,T]`, prompts and what was generated, padded as `generate` pads.
        stats: what ran.
    """

    sequences: Tensor
    stats: LosslessStats


@dataclass
class _Request:
    """What `generate` asks for.

    Args:
        ids: `[B,T]`, all tokens, or those behind the ones that the cache holds.
        rules: how tokens are chosen.
        config: of the generation.
        streamer: which is told of each token; None: nobody.
        mask: `[B,columns]` over all tokens; None: no padding.
        positions: `[B,n]` of the tokens, the new ones last; None: counted from the mask.
    """

    ids: Tensor
    rules: Rules
    config: Any
    streamer: Any
    mask: Tensor | None
    positions: Tensor | None = None

    @property
    def columns(self) -> int:
        """Tokens of the prompt, earlier turns and padding included."""
        whole = int(getattr(self.config, "_mask_length", self.ids.shape[1]))  # the mask's, where it was all ones
        return whole if self.mask is None else self.mask.shape[1]

    def new(self, stored: int) -> tuple[Tensor, Tensor]:
        """Return ids and positions `[B,n]` of the tokens that a cache of `stored` tokens lacks.

        Raises:
            ValueError: the ids given are not all tokens, nor the new ones.
        """
        batch, columns = len(self.ids), self.columns
        if not columns:
            raise ValueError("the prompt is empty: give generate the ids of a token or more")
        new = self.ids[:, stored:] if columns == self.ids.shape[1] else self.ids
        if stored + new.shape[1] != columns or not new.shape[1]:
            raise ValueError(
                f"the cache holds {stored} tokens and the attention mask is of {columns}, so that {columns - stored} "
                f"are new: give generate the ids of all {columns} tokens, or of the new ones alone, got "
                f"{self.ids.shape[1]}"
            )
        positions = self.positions
        if positions is None:
            every = torch.ones(batch, columns, dtype=torch.int64) if self.mask is None else self.mask.long()
            positions = (every.cumsum(1) - 1).clamp(min=0)
        return new, positions[:, -new.shape[1] :].expand(batch, -1).to(self.ids.device)

    @property
    def pad(self) -> int:
        """The token behind a sequence that has ended; 0 where the model names none."""
        given = getattr(self.config, "_pad_token_tensor", None)
        given = self.config.pad_token_id if given is None else given
        return 0 if given is None else int(given)


class Lossless:
    """A `custom_generate` for `model.generate`: greedy decoding and sampling as with full attention.

    Greedy tokens are those of full attention. Both add the same numbers in another order, so that two tokens whose
    scores are nearer than rounding may change places; such ties are counted (`LosslessStats.ties`). Samples are
    distributed as full attention's.

    Args:
        selector, budget: of the draft, as of `SparseCache`. Where `generate` is given a `SparseCache`, that one is used
            instead: it may hold earlier turns, and keeps this one.
        draft: tokens to draft before each check, 1 to 16; 0: plain dense decoding; "auto": as many as the seconds and
            the acceptance of this generation make best, 0 where drafts do not pay.
        choose_once: whether the drafts between two checks read the rows that the first of them chose, beside those that
            are read anyway: cheaper drafts, of which fewer may be accepted.
        rounding: two best scores that differ by less than this share of the best one are a tie; None: four units of
            the model's dtype.
        streamer: told of the prompt and of each token, as `generate` tells one; None: nobody. transformers hands its
            own on to no `custom_generate`.
        settings: further ones of `SparseCache`.

    Attributes:
        stats: of the last generation; None before the first.

    Raises:
        ValueError: another `draft`.
    """

    def __init__(
        self,
        selector: Method | PerLayer | None = None,
        budget: Budget | PerLayer | None = 256,
        draft: int | str = "auto",
        *,
        choose_once: bool = False,
        rounding: float | None = None,
        streamer: Any = None,
        **settings: Any,
    ) -> None:
        if draft != "auto" and (type(draft) is not int or not 0 <= draft <= MOST_DRAFTS):
            raise ValueError(f'draft is a number of tokens, 0 to {MOST_DRAFTS}, or "auto", got {draft!r}')
        if settings.get("sparse_from") is not None:
            raise ValueError("sparse_from has no meaning here: drafts alone are sparse")
        self.selector, self.budget, self.draft, self.rounding = selector, budget, draft, rounding
        self.choose_once, self.streamer, self.settings = choose_once, streamer, settings
        self.stats: LosslessStats | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **inputs: Any,
    ) -> Tensor:
        """Generate, as `model.generate` calls it, which has no `tokenizer` for a `custom_generate`: it refuses
        `stop_strings`. `stopping_criteria=[StopStringCriteria(tokenizer, strings)]` stops there, and
        `generate_lossless` makes that.

        Raises:
            ValueError: what `generate` was asked for beside greedy decoding and sampling; a cache that is neither empty
                nor a `SparseCache`; one that cannot crop, evicts or keeps rounded rows.
            ModelError: layers that do not crop; a RoPE whose frequencies would follow the drafts' length.
        """
        check_request(generation_config, inputs, synced_gpus)
        check_processors(logits_processor, self.draft)
        rules = Rules(logits_processor, stopping_criteria, bool(generation_config.do_sample))
        request = _Request(input_ids, rules, generation_config, self.streamer, inputs.get("attention_mask"))
        request.positions = inputs.get("position_ids")
        given = cache_in(inputs)
        if isinstance(given, SparseCache):
            return self._generate(model, given, request)
        check_given(given, model)
        with SparseCache(model, self.selector, self.budget, **self.settings) as cache:
            return self._generate(model, cache, request)

    def _generate(self, model: Any, cache: SparseCache, request: _Request) -> Tensor:
        check_cache(cache)
        rounding = ROUNDING * torch.finfo(model.dtype).eps if self.rounding is None else self.rounding
        length = self._length(cache, len(request.ids))
        rules = request.rules
        loop = DraftLoop(model, cache, request.ids, rules, length, rounding, request.streamer, self.choose_once)
        self.stats, before = loop.stats, cache.sparse_from
        past = [getattr(layer, "record_past", True) for layer in cache.layers]
        try:
            stored = cache.get_seq_length()
            new, positions = request.new(stored)
            most = float("inf") if loop.most is None else loop.most - loop.prompt
            check_frequencies(model, stored, positions, most, MOST_DRAFTS, self.draft)
            if request.streamer is not None:
                request.streamer.put(request.ids.cpu())
            loop.prefill(new, request.mask, positions, request.config.prefill_chunk_size)
            try:
                loop.run()
                loop.settle(request.columns, request.mask)
            except BaseException:
                loop.go_back()
                raise
        finally:
            cache.sparse_from = before
            for layer, recorded in zip(cache.layers, past, strict=True):
                if not recorded and layer.record_past:  # windows keep what they need again, and no past
                    if layer.is_initialized:
                        layer.crop(0)
                    layer.record_past = False
        if request.streamer is not None:
            request.streamer.end()
        return loop.tokens(request.pad)

    def _length(self, cache: SparseCache, batch: int) -> DraftLength:
        return auto_length(cache, batch) if self.draft == "auto" else FixedLength(int(self.draft))


def auto_length(cache: SparseCache, batch: int) -> DraftLength:
    """Return what chooses the number of drafts for `batch` sequences in a cache, by its model's sizes and the clock.

    Of processes that generate together, all choose the same.
    """
    model = cache.model
    weights = sum(part.nbytes for part in model.parameters())
    rows = sum(
        2 * what.heads * what.size * model.dtype.itemsize
        for index, what in cache.prepared.layers.items()
        if index in cache.sparse_layers
    )
    length, groups = AutoLength(batch * rows / weights), groups_of(cache)
    return SharedLength(length, groups, input_device(model)) if groups else length


def generate_lossless(
    model: Any,
    ids: Tensor,
    selector: Method | PerLayer | None = None,
    budget: Budget | PerLayer | None = 256,
    draft: int | str = "auto",
    *,
    choose_once: bool = False,
    rounding: float | None = None,
    cache: SparseCache | None = None,
    streamer: Any = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> LosslessOutput:
    """Generate what full attention generates, by drafts of sparse steps that full attention checks.

    Args:
        model: of transformers, in eval mode.
        ids: `[B,T]` prompts.
        selector, budget, draft, choose_once, rounding, streamer: see `Lossless`.
        cache: a `SparseCache` of this model, which holds earlier turns and keeps this one, instead of `selector` and
            `budget`.
        settings: of the `SparseCache` that is made, such as `{"sink": 4}`.
        options: of `model.generate`, such as `attention_mask`, `max_new_tokens`, `do_sample`; `stop_strings` with a
            `tokenizer`.

    Raises:
        ValueError, ModelError: see `Lossless` and `SparseCache`.
    """
    custom = Lossless(
        selector, budget, draft, choose_once=choose_once, rounding=rounding, streamer=streamer, **(settings or {})
    )
    options.setdefault("attention_mask", torch.ones_like(ids))
    if cache is not None:
        options["cache"] = cache
    if options.get("stop_strings") is not None and options.get("tokenizer") is not None:
        stop = StopStringCriteria(options.pop("tokenizer"), options.pop("stop_strings"))
        options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or []), stop])
    sequences = model.generate(ids, custom_generate=custom, **options)
    assert custom.stats is not None
    return LosslessOutput(sequences, custom.stats)
