"""lm-evaluation-harness' Hugging Face model, decoding through a `SparseCache`: `--model sparseattn`.

`generate_until` prefills a prompt densely, all but its tail, and decodes the rest sparsely. `loglikelihood`, and
multiple choice with it, prefills the context and decodes the continuation token by token through the cache, so that
what is scored was predicted by sparse steps. (`HFLM` scores continuations in one dense pass without a cache.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from tqdm import tqdm

from sparseattn.core.activity import Activity, of_heads
from sparseattn.core.no_effect import NoEffect, idle_budget, idle_layers, refuse
from sparseattn.evaluation.harness.forced import Forced, predicted
from sparseattn.evaluation.harness.processes import gathered, in_order, joined
from sparseattn.evaluation.harness.report import finished
from sparseattn.evaluation.harness.settings import SparseSettings
from sparseattn.evaluation.harness.tails import PromptTail
from sparseattn.evaluation.harness.tally import Tally
from sparseattn.evaluation.harness.tasks import by_task
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.errors import ModelError
from sparseattn.models.load import folder_of, has_tokenizer
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.utils.devices import usable_device
from sparseattn.utils.ranks import job_rank, job_size

NAME = "sparseattn"
FEWEST = 2  # rows of a prompt and its answer, of which a method can leave one out


@register_model(NAME)
class SparseLM(HFLM):
    """A causal LM of transformers that decodes sparsely.

    Args:
        pretrained: a name of `sparseattn models`, a folder, a GGUF file, a name on the hub, or a model.
        settings: how it decodes; or the fields of `SparseSettings` by name, as `--model_args` gives them.
        device: as text; None: a CUDA device if there is one, else the CPU.
        hf: further arguments of `HFLM`.

    Raises:
        ModelError: no such model, one without a tokenizer, or no causal LM.
        ValueError: settings that do not fit the model.
    """

    def __init__(
        self, pretrained: Any, *, settings: SparseSettings | None = None, device: str | None = None, **hf: Any
    ) -> None:
        own = {name: hf.pop(name) for name in SparseSettings.__dataclass_fields__ if name in hf}
        self.settings = SparseSettings(**own) if settings is None else settings
        source = folder_of(pretrained) if isinstance(pretrained, str) else pretrained
        if isinstance(source, str) and Path(source).is_dir() and not has_tokenizer(Path(source)):
            raise ModelError(
                f"{pretrained} is a model of bytes, without a tokenizer, which lm-eval needs: name another"
            )
        super().__init__(source, device=device or str(usable_device(None)), **hf)
        if self.backend != "causal":
            raise ModelError(f"{pretrained} is no causal LM, and sparse attention is of their decoding")
        self._shared = hf.get("tp_plan") is not None  # by all processes, each of which asks everything
        if isinstance(pretrained, str) and not self._shared:
            self._rank, self._world_size = job_rank(), job_size()
        self._empty: SparseCache = self.settings.cache(self.model)
        if not self._empty.sparse_layers:
            whole = SparseCache(self.model, "window", None)
            refuse(idle_layers(self.settings.dense_layers, max(whole.sparse_layers)))
        self._tails: dict[str, PromptTail] = {}  # by prompt, of the task that is asked
        self._batch: list[PromptTail] = []  # of the batch that was encoded last
        self.tally = self._counted = Tally(self.settings.to_dict())

    # -- task by task --------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model says behind each prompt."""
        return self._asked(requests, super().generate_until, disable_tqdm)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return of each continuation its log-likelihood, and whether it is the greedy one."""
        return self._asked(requests, super().loglikelihood, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, all of whose tokens are decoded sparsely."""
        return self._asked(requests, super().loglikelihood_rolling, disable_tqdm)

    def _asked(self, requests: list[Instance], own: Callable[..., list[Any]], disable_tqdm: bool) -> list[Any]:
        """Ask task by task, so that steps are counted by task."""

        def ask(task: str, mine: list[Instance]) -> list[Any]:
            self._check_effect(task, mine)
            self._tails = {
                request.args[0]: self.settings.tails.of(task, request.doc, request.args[0], self._count)
                for request in mine
                if len(request.args) > 1  # a rolling one has a text alone
            }
            self.tally.begin(task, self._tails.values())
            return own(mine, disable_tqdm=disable_tqdm)

        return by_task(requests, ask)

    def _check_effect(self, task: str, requests: Sequence[Instance]) -> None:
        """NoEffect where the settings would read every row of every sequence of a task."""
        rows = self.settings.own_rows
        if rows is None:
            return
        texts = {request.args[0] for request in requests}
        added = 0  # behind a text, at most
        for request in requests:
            if len(request.args) > 1:
                more = request.args[1]
                added = max(added, self._count(more) if isinstance(more, str) else self._generated(more))
        longest = min(max(map(self._count, texts)) + added, self.max_length)
        if longest < FEWEST:
            raise NoEffect(
                f"the longest prompt of {task} has {longest:,} rows with its answer, of which no method can leave any "
                f"out: leave {task} out"
            )
        refuse(idle_budget(rows, longest, self.settings.sink, self.settings.window, f"the longest prompt of {task}"))

    def _generated(self, options: dict[str, Any]) -> int:
        """Return how many tokens a request may generate."""
        return int(normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"])

    def _count(self, text: str) -> int:
        return len(self.tok_encode(text, add_special_tokens=False))

    # -- generation ----------------------------------------------------------------------------------------------------

    def tok_batch_encode(self, strings: list[str], *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Return ids and mask of prompts, `[B,T]` each, and note their tails for the generation that follows."""
        self._batch = [self._tails[text] for text in strings]
        return super().tok_batch_encode(strings, *args, **named)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Return `[B,T+n]`; prompts with tails of one length go through the model together."""
        mask = options.pop("attention_mask")
        lengths = mask.sum(1).tolist()
        by_tail: dict[int, list[int]] = {}
        for row, (own_tail, length) in enumerate(zip(self._batch, lengths, strict=True)):
            by_tail.setdefault(min(own_tail.tokens, length), []).append(row)
        made: dict[int, Tensor] = {}
        for tail, rows in by_tail.items():
            spare = context.shape[1] - max(lengths[row] for row in rows)  # padding that none of them needs
            ids, own = context[rows, spare:], mask[rows, spare:]
            cache = self._empty.clone()
            cache.sparse_from = ids.shape[1] - tail
            given = {**options, "attention_mask": own, **cache_argument(cache)}
            out = super()._model_generate(ids, max_length - spare, stop, **given)
            self._note(cache.activity())
            made |= dict(zip(rows, out[:, ids.shape[1] :], strict=True))
        pad = int(self.tokenizer.pad_token_id)
        new = torch.nn.utils.rnn.pad_sequence([made[row] for row in sorted(made)], True, pad)
        return torch.cat([context, new], 1)

    # -- log-likelihoods -----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: Any = None
    ) -> list[tuple[float, bool]]:
        wanted = []
        for text, context, continuation in requests:
            tail = 1 if text is None else self._tails[text[0]].tokens
            wanted.append(Forced.of(context, continuation, tail, self.max_length))
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or job_rank() > 0, desc="Running loglikelihood requests")
        for numbers, logits, ran in predicted(self.model, self._empty, wanted, self._sequences(requests, override_bs)):
            self._note(ran)
            behind = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
            for number in numbers:
                scored = torch.tensor(wanted[number].scored, device=behind.device)
                own = behind[-len(scored) :]
                scores[number] = float(own.gather(1, scored[:, None]).sum()), bool((own.argmax(1) == scored).all())
                if (text := requests[number][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", text, scores[number])
                bar.update(1)
        bar.close()
        return scores

    def _sequences(self, requests: Sequence[Any], override_bs: Any) -> int:
        """Return how many sequences go through the model together."""
        if override_bs is not None:
            return int(override_bs)
        if self.batch_size != "auto":
            return int(self.batch_size)
        longest = sorted(requests, key=lambda each: len(each[1]) + len(each[2]), reverse=True)
        self.batch_sizes = {0: self._detect_batch_size(longest, 0)}
        return self.batch_sizes[0]

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """Return logits `[B,T,V]` of a dense pass, by which `_detect_batch_size` finds what fits; nothing is scored."""
        cache = self._empty.clone()
        cache.sparse_from = inps.shape[1]
        with torch.no_grad():
            logits: Tensor = self.model(inps, use_cache=True, **cache_argument(cache)).logits
        return logits

    # -- what ran ------------------------------------------------------------------------------------------------------

    def _note(self, ran: Activity) -> None:
        self.tally.add(of_heads(self._empty.here.of_all(ran)))

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's hook, which keeps responses; what they took to make is kept beside them."""
        super().set_cache_hook(cache_hook)
        self.tally.keep_in(cache_hook.dbdict)

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes of a model, with what ran; it asks behind the last task, before it writes scores.

        Raises:
            NothingSparse: no step of a task was sparse.
        """
        return {**super().get_model_info(), NAME: finished(self._counted.record())}

    # -- several processes ---------------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return this process's number for each: lm-eval repeats requests until all have as many, for models whose
        passes wait for each other, as these do not."""
        return tensor.reshape(-1).repeat(self.world_size)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return, in process `dst`, what all have found, in the order of one process."""
        every = [obj] if self.world_size == 1 else gathered(obj, dst)
        return every if every is None else [in_order(every)]

    def barrier(self) -> None:
        """Bring the counts to the first process, where lm-eval has the processes wait for each other."""
        self._counted = self.tally if self.world_size == 1 else joined(self.tally)
