"""Draft by sparse steps, check by full attention, keep what agrees: https://arxiv.org/abs/2211.17192 with one model."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.drafts.columns import keep_first, lay_out
from sparseattn.models.drafts.length import DraftLength, Round
from sparseattn.models.drafts.rules import Rules, near
from sparseattn.models.drafts.stats import LosslessStats

DENSE = 1 << 60  # a position that no token reaches: all tokens before it attend densely


class DraftLoop:
    """One generation. Drafts and model are the same weights and share a `SparseCache`, which holds full rows.

    Every round feeds the newest token and k drafts, of which full attention tells how many it would have chosen too.
    Rows of drafts are forgotten before that pass, which makes them anew: sparse steps leave other rows in all layers
    but the first.

    Args:
        model: prepared for `cache`.
        cache: a `SparseCache`; it may hold earlier turns.
        ids: `[B,T]`, all tokens so far.
        rules: how tokens are chosen.
        length: how many tokens are drafted.
        rounding: two best scores that differ by less than this share of the best one are a tie.
        streamer: told of each token; None: nobody.
        choose_once: whether a round's drafts read the rows that its first one chose.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        ids: Tensor,
        rules: Rules,
        length: DraftLength,
        rounding: float,
        streamer: Any = None,
        choose_once: bool = False,
    ) -> None:
        self.choose_once = choose_once
        self.model, self.cache, self.rules, self.length = model, cache, rules, length
        self.rounding, self.streamer, self.stats = rounding, streamer, LosslessStats()
        batch, self.prompt = ids.shape
        self.ids = ids.clone()  # [B,room]
        self.ends = [self.prompt] * batch  # tokens of each sequence
        self.done = [False] * batch
        self.owing = [False] * batch  # done, and the last token's row is not stored
        self.most: int | None = getattr(rules.criteria, "max_length", None)
        # A layer with a sliding window counts columns: its sequences keep the same number of them.
        self.together = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
        self.at = torch.zeros(batch, dtype=torch.int64)  # position of the next token fed
        # Columns of the cache that hold full attention's rows of tokens given out; None while rows are dropped.
        self.sound: int | None = 0

    # -- a pass ------------------------------------------------------------------------------------------------------

    def prefill(self, ids: Tensor, mask: Tensor | None, positions: Tensor, chunk: int | None) -> None:
        """Take in what of the prompt is not stored yet, and choose the first token.

        Args:
            ids: `[B,n]`, those tokens.
            mask: `[B,T]` over all tokens, stored ones too; None: no padding.
            positions: `[B,n]`.
            chunk: tokens a pass; None: all in one.
        """
        started, stored, count = time.perf_counter(), self.cache._tokens(), ids.shape[1]
        self.cache.sparse_from = DENSE
        for start in range(0, count, chunk or count):
            stop = min(start + (chunk or count), count)
            seen = None if mask is None else mask[:, : stored + stop]
            logits = self._forward(ids[:, start:stop], seen, positions[:, start:stop], 1)
        self.cache.activate_past_recording()
        self.stats.prefill_seconds = time.perf_counter() - started
        scores = self.rules.scores(self.ids, self.ends, logits)
        token, _ = self.rules.choose(scores[:, 0])
        self.begin(token[:, None], positions[:, -1].cpu() + 1, scores)

    def begin(self, token: Tensor, at: Tensor, scores: Tensor) -> None:
        """Go on from the first token `[B,1]`, at position `at` `[B]`, chosen by scores `[B,1,V]`."""
        self.at = at
        self._emit(token, [1] * len(self.ends), scores)
        self.owing = list(self.done)

    @torch.no_grad()
    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, keep: int) -> Tensor:
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **cache_argument(self.cache),
        ).logits

    def _feed(self, tokens: Tensor, counts: list[int], after: int, *, dense: bool) -> Tensor:
        """Run the model over `tokens` `[B,n]`, of sequence b the first `counts[b]`, the others being padding.

        Args:
            tokens, counts: as said.
            after: tokens fed since the positions `at`.
            dense: whether they attend to every row.

        Returns:
            Logits `[B,n,V]`.
        """
        batch, new = tokens.shape
        self.cache.sparse_from = DENSE if dense else None
        stored, mask = self.cache._real.real, None
        if stored is not None or min(counts) < new:
            if stored is None:
                stored = torch.ones(batch, self.cache._tokens(), dtype=torch.bool)
            real = torch.arange(new) < torch.tensor(counts)[:, None]
            mask = torch.cat([stored, real], 1).long().to(tokens.device)
        positions = (self.at + after)[:, None] + torch.arange(new)
        return self._forward(tokens, mask, positions.to(tokens.device), new)

    # -- a round -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Generate until every sequence has stopped."""
        started = time.perf_counter()
        while not all(self.done):
            self.round()
        stats = self.stats
        measured = stats.draft_seconds + stats.verify_seconds + stats.dense_seconds
        stats.other_seconds = time.perf_counter() - started - measured
        stats.tokens = sum(self.ends) - self.prompt * len(self.ends)
        stats.reason = self.length.reason

    def round(self) -> None:
        """Draft, check, and go on by what was accepted and one more token."""
        active = [b for b, done in enumerate(self.done) if not done]
        self.sound = stored = self.cache._tokens()
        count = self.length.next(stored)
        if self.most is not None:
            count = min(count, self.most - min(self.ends[b] for b in active) - 1)
        begun = self._now()
        drafts, proposed = self._draft(count)
        drafted, before = self._now(), self._attention()
        logits = self._verify(drafts)
        self.sound = stored + 1
        scores = self.rules.scores(self.ids, self.ends, logits)
        accepted, tokens = self.rules.accept(drafts, proposed, scores)
        agreed = accepted.tolist()
        checked, attended = self._now(), self._attention() - before
        if self.together:
            agreed = [min(agreed[b] for b in active)] * len(agreed)
        fed = [self._fed(b, count + 1) for b in range(len(self.ends))]
        emitted = self._emit(tokens, [0 if done else n + 1 for done, n in zip(self.done, agreed, strict=True)], scores)
        self.sound = None
        self._keep(fed, emitted, agreed, count + 1)
        self.sound = self.cache._tokens()
        stats = self.stats
        stats.rounds[count] = stats.rounds.get(count, 0) + 1
        stats.draft_steps += count
        stats.drafted += count * len(active)
        stats.accepted += sum(agreed[b] for b in active)
        if count:
            stats.draft_seconds += drafted - begun
            stats.verify_seconds += checked - drafted
        else:
            stats.dense_seconds += checked - drafted
        accepted_by = [agreed[b] for b in active]
        known = self.ids.device.type == "cpu"  # elsewhere the clock does not wait for attention
        came = Round(count, accepted_by, drafted - begun, checked - drafted, attended if known else None)
        self.length.observe(came)

    def go_back(self) -> None:
        """Leave no row of a draft in the cache after `run` was cut short, by a streamer, an error or Ctrl-C.

        A cache that cannot go back is left empty, and so is one of several sequences, which keep different numbers of a
        round's tokens: the next turn takes in its tokens anew.
        """
        cache = self.cache
        if self.sound is None or len(self.ends) > 1:
            cache.reset()
            return
        try:
            if not cache._passes.whole(cache.layers):
                cache.crop(0)
            if (more := cache._tokens() - self.sound) > 0:
                cache.crop(-more)
        except (ValueError, RuntimeError):
            cache.reset()

    def _attention(self) -> float:
        """Return what dense attention of the sparse layers has taken so far, in seconds of the host."""
        return sum(layer.dense_seconds for layer in self.cache.sparse_layers.values())

    def _now(self) -> float:
        """Return the time, once the device has done what it was given."""
        if self.ids.is_cuda:
            torch.cuda.synchronize(self.ids.device)
        return time.perf_counter()

    def _fed(self, b: int, new: int) -> int:
        """Return how many of a verification's tokens are of sequence b."""
        return new if not self.done[b] else int(self.owing[b])

    def _newest(self) -> Tensor:
        """Return `[B,1]`, the last token of each sequence, whose row is not stored yet."""
        return self.ids.gather(1, torch.tensor(self.ends, device=self.ids.device)[:, None] - 1)

    def _draft(self, count: int) -> tuple[Tensor, list[Tensor]]:
        """Return `count` drafts `[B,count]` by sparse steps, with their probabilities if they are drawn."""
        token = self._newest()
        drafts, proposed = token[:, :0], list[Tensor]()
        if not count:
            return drafts, proposed
        for layer in self.cache.sparse_layers.values():
            layer.keep_unsealed(count)
        self._room(max(self.ends) + count + 1)
        alive = [int(not done) for done in self.done]
        try:
            for i in range(count):
                self._keep_choices(self.choose_once and i > 0)
                logits = self._feed(token, alive, i, dense=False)
                ends = [end + i for end in self.ends]
                chosen, probabilities = self.rules.choose(self.rules.scores(self.ids, ends, logits)[:, 0])
                token = chosen[:, None]
                self.ids.scatter_(1, torch.tensor(ends, device=self.ids.device)[:, None], token)
                drafts = torch.cat([drafts, token], 1)
                if probabilities is not None:
                    proposed.append(probabilities)
        finally:
            self._keep_choices(False)
        stored, self.sound = self.sound, None
        self.cache.crop(-count)
        self.sound = stored
        return drafts, proposed

    def each_chose(self) -> bool:
        """Return whether each draft of the last round chose rows: `window` chooses none, `pillar` those of the last
        check for all of them."""
        parts = (part for layer in self.cache.sparse_layers.values() for part in layer.parts)
        searches = [part.rows.search for part in parts if not part.rows.search.abilities.check_followers]
        return any(search.chosen is not None and search.chosen.sizes[3] > 0 for search in searches)

    def _keep_choices(self, keep: bool) -> None:
        """Let layers read at the next steps what they chose last, or choose at each."""
        for layer in self.cache.sparse_layers.values():
            for part in layer.parts:
                part.rows.search.keep_choice = keep

    def _verify(self, drafts: Tensor) -> Tensor:
        """Return full attention's logits `[B,k+1,V]` behind the newest token and each draft `[B,k]`."""
        tokens = torch.cat([self._newest(), drafts], 1)
        fed = [self._fed(b, tokens.shape[1]) for b in range(len(self.ends))]
        return self._feed(tokens, fed, 0, dense=True)

    def _emit(self, tokens: Tensor, limits: list[int], scores: Tensor) -> list[int]:
        """Append the first `limits[b]` of `tokens` `[B,n]` to each sequence, up to where it stops.

        Returns:
            How many each took.
        """
        self._room(max(self.ends) + tokens.shape[1])
        ties = None if self.rules.sample else near(scores, self.rounding).tolist()
        took = [0] * len(limits)
        for column in range(max(limits)):
            going = [b for b, limit in enumerate(limits) if column < limit and not self.done[b]]
            if not going:
                break
            self.ids[going, [self.ends[b] for b in going]] = tokens[going, column]
            for b in going:
                if ties is not None and ties[b][column]:
                    self.stats.ties.append((b, self.ends[b] - self.prompt))
                if self.streamer is not None:
                    self.streamer.put(tokens[b : b + 1, column].cpu())
                self.ends[b] += 1
                took[b] += 1
            for end in {self.ends[b] for b in going}:
                stopped = self.rules.stops(self.ids[:, :end])
                for b in going:
                    self.done[b] = self.done[b] or (self.ends[b] == end and stopped[b])
        return took

    def _room(self, tokens: int) -> None:
        """Make room for so many tokens of a sequence."""
        if (more := tokens - self.ids.shape[1]) > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, more + 256))

    def _keep(self, fed: list[int], emitted: list[int], agreed: list[int], new: int) -> None:
        """Forget the rows of what was not kept: a sequence's last token waits for the next pass, as in `generate`.

        Args:
            fed: tokens of the pass, of each sequence.
            emitted: tokens each sequence went on by: the rows before the last of these are stored.
            agreed: drafts accepted.
            new: columns of the pass.
        """
        kept = []
        for b, count in enumerate(emitted):
            if not count:
                kept.append(fed[b])
                self.owing[b] = False
                continue
            # One that stops at a draft while others go on has the row of its last token too.
            last = self.done[b] and count <= agreed[b] and count < max(emitted)
            kept.append(count + last)
            self.owing[b] = self.done[b] and not last
        keep_first(self.cache, new, torch.tensor(kept))
        self.at += torch.tensor(kept)

    # -- the end -----------------------------------------------------------------------------------------------------

    def tokens(self, pad: int) -> Tensor:
        """Return `[B,longest]`, `pad` behind shorter sequences."""
        longest = max(self.ends)
        behind = torch.arange(longest) >= torch.tensor(self.ends)[:, None]
        return self.ids[:, :longest].masked_fill(behind.to(self.ids.device), pad)

    def settle(self, columns: int, prompt: Tensor | None) -> None:
        """Leave the cache as `generate` does: all tokens but the last column, each in the column of its token.

        Padding behind a sequence that ended before others is not stored.

        Args:
            columns: of the prompt, earlier turns included.
            prompt: `[B,columns]` bool, which of them are real; None: all.
        """
        if len(self.ends) == 1 or self.together:
            return
        longest = max(self.ends)
        late = [owing and end < longest for owing, end in zip(self.owing, self.ends, strict=True)]
        if any(late):
            self._feed(self._newest(), [int(x) for x in late], 0, dense=True)
        batch = len(self.ends)
        before = torch.ones(batch, columns, dtype=torch.bool) if prompt is None else prompt.cpu().bool()
        generated = torch.tensor(self.ends)[:, None] - self.prompt
        behind = torch.arange(longest - self.prompt - 1) < generated
        real = torch.cat([before, behind], 1)
        mask = self.cache._real.real
        counts = torch.full((batch,), self.cache._tokens()) if mask is None else mask.sum(1)
        over = counts - real.sum(1)
        if bool((over > 0).any()):  # the longest, where it stopped at a draft
            self._drop_last(over)
        lay_out(self.cache, real)

    def _drop_last(self, over: Tensor) -> None:
        """Forget the last `over` `[B]` rows, at most 1, of sequences whose last real column need not be the last."""
        for layer in self.cache.sparse_layers.values():
            for part in layer.parts:
                part.rows.crop(over)
        mask = self.cache._real.real
        if mask is None:
            mask = torch.ones(len(over), self.cache._tokens(), dtype=torch.bool)
        last = mask.long().cumsum(1) == mask.sum(1, keepdim=True)
        self.cache._real.real = mask & ~(last & mask & (over > 0)[:, None])
