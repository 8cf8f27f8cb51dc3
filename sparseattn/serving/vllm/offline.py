"""A vLLM engine in this process, which answers prompts by one method after another: for comparisons."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sparseattn.core.activity import Activity
from sparseattn.serving.vllm.counters import stats
from sparseattn.serving.vllm.installed import check_plugin, engine
from sparseattn.serving.vllm.settings import KEY, Settings
from sparseattn.utils import children


@dataclass(frozen=True)
class OfflinePrompt:
    """A prompt.

    Args:
        ids: its tokens.
        limit: tokens of an answer at most.
        done: told the answer so far, whether it is whole.
    """

    ids: list[int]
    limit: int
    done: Callable[[str], bool]


@dataclass(frozen=True)
class Answered:
    """What came.

    Args:
        ids: tokens of the answer, greedy.
        seconds: from when the engine was given the prompt to the end.
        first_seconds: to the first token.
    """

    ids: list[int]
    seconds: float
    first_seconds: float


def check_offline() -> str:
    """Return the version of a vLLM whose methods can be switched.

    Raises:
        ValueError: there is none here, or it is of another series or for CUDA.
    """
    running = engine()
    if not running.cpu:
        raise ValueError(
            "--engine vllm switches methods in a running engine, which the CUDA backend cannot: start a server for "
            "each method (sparseattn serve) and ask them with --endpoint"
        )
    check_plugin()
    return running.version


class Offline:
    """An engine, and what it serves by (`use`). Use it as a context manager: it holds most of the memory it was given.

    Args:
        model: a folder or a name on the hub.
        first: settings that it starts with; None only where it is to stay stock vLLM.
        dtype: of weights and cache; "auto" as stored.
        concurrency: prompts at once, at most.
        cache_bytes: of the cache.

    Raises:
        ValueError: see `check_offline`, and what `settings_of` refuses.
    """

    def __init__(self, model: str, first: Settings | None, dtype: str, concurrency: int, cache_bytes: int) -> None:
        version = check_offline()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # methods are switched in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.update(children.environment({}))  # vLLM asks Pythons of its own what a model can do
        from vllm import LLM

        additional: dict[str, Any] = {} if first is None else {KEY: first.to_dict()}
        self.version, self.concurrency = version, concurrency
        self._stock = first is None
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_num_seqs=concurrency,
            max_model_len=-1,  # as many as the model has positions and the cache room
            kv_cache_memory_bytes=cache_bytes,
            enforce_eager=True,
            enable_prefix_caching=False,
            additional_config=additional,
        )
        self.positions = int(self._llm.model_config.max_model_len)

    def __enter__(self) -> Offline:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def use(self, settings: Settings | None) -> None:
        """Serve by these from the next prompt on; None: as stock.

        Raises:
            ValueError: settings that do not fit the engine.
        """
        from sparseattn.serving.vllm.cpu import switch

        if not self._stock:
            switch(settings)
        elif settings is not None:
            raise ValueError("an engine that was started as stock vLLM stays so")

    def check(self, settings: Settings) -> None:
        """ValueError for settings that do not fit the engine; nothing changes."""
        from sparseattn.serving.vllm.cpu import check

        check(settings)

    def answers(self, prompts: Iterable[tuple[Any, OfflinePrompt]]) -> Iterator[tuple[Any, Answered]]:
        """Prompts, each with a name of any kind, as answers by these names, as soon as each is there.

        Prompts are taken as there is room for them; those under way when the iteration is closed are given up.
        """
        llm = self._llm.llm_engine
        from vllm import SamplingParams

        coming, number = iter(prompts), 0
        under_way: dict[str, list[Any]] = {}  # name, prompt, when it began, seconds to the first token
        try:
            while True:
                while len(under_way) < self.concurrency and (tagged := next(coming, None)) is not None:
                    name, prompt = tagged
                    options = SamplingParams(temperature=0, max_tokens=prompt.limit)
                    llm.add_request(f"sparseattn-{number}", {"prompt_token_ids": prompt.ids}, options)
                    under_way[f"sparseattn-{number}"] = [name, prompt, time.perf_counter(), None]
                    number += 1
                if not under_way:
                    return
                for out in llm.step():
                    name, prompt, began, first = under_way[out.request_id]
                    made, now = out.outputs[0], time.perf_counter() - began
                    if first is None and made.token_ids:
                        under_way[out.request_id][3] = first = now
                    whole = prompt.done(made.text)
                    if whole and not out.finished:
                        llm.abort_request([out.request_id])
                    if whole or out.finished:
                        del under_way[out.request_id]
                        yield name, Answered(list(made.token_ids), now, now if first is None else first)
        finally:
            llm.abort_request(list(under_way))

    @staticmethod
    def counts() -> Activity:
        """Return what ran so far, see `stats`."""
        return stats()
