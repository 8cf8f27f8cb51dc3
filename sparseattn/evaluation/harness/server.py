"""A server of `sparseattn serve` as a model of lm-eval, whose counters are read around every task.

An engine computes log-probabilities of a prompt in its dense prefill: no step of it is sparse, whatever the server
decodes by. Tasks that ask for them, multiple choice among them, are therefore refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI

from sparseattn.evaluation.harness.report import finished
from sparseattn.evaluation.harness.tally import Tally
from sparseattn.evaluation.harness.tasks import by_task
from sparseattn.serving.metrics import served_activity

NAME = "sparseattn-completions"


class DenseLogprobs(ValueError):
    """A task that asks a server for log-probabilities of prompts."""


def refuse_logprobs(tasks: Iterable[str]) -> None:
    """Raise DenseLogprobs where there are tasks that ask for log-probabilities."""
    if named := ", ".join(tasks):
        raise DenseLogprobs(
            f"{named}: such tasks score log-probabilities of prompts, which a server computes in its dense prefill, so "
            f"that nothing in the score would be sparse. Ask the model here instead (--model sparseattn), which "
            f"decodes continuations token by token; or name tasks that generate answers"
        )


@register_model(NAME)
class SparseServer(LocalCompletionsAPI):
    """A server that answers `/v1/completions`.

    Args:
        base_url: as lm-eval's `local-completions` has it: `http://127.0.0.1:8000/v1/completions`.
        given: its further arguments.

    Raises:
        MetricsError: a server that does not count sparse steps.
    """

    def __init__(self, base_url: str | None = None, **given: Any) -> None:
        self.counted = served_activity(base_url or "")
        super().__init__(base_url=base_url, **given)
        self.tally = Tally({"server": base_url})

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the server says behind each prompt, task by task."""
        own = super().generate_until

        def ask(task: str, mine: list[Any]) -> list[str]:
            self.tally.begin(task)
            answers: list[str] = own(mine, disable_tqdm=disable_tqdm)
            now = served_activity(self.base_url)
            self.tally.add(now - self.counted)
            self.counted = now
            return answers

        return by_task(requests, ask)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        """Refuse, by DenseLogprobs."""
        refuse_logprobs(sorted({str(request.task_name) for request in requests}))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> Any:
        """Refuse, by DenseLogprobs."""
        refuse_logprobs(sorted({str(request.task_name) for request in requests}))

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take lm-eval's hook, which keeps responses; what they took to make is kept beside them."""
        super().set_cache_hook(cache_hook)
        self.tally.keep_in(cache_hook.dbdict)

    def get_model_info(self) -> dict[str, Any]:
        """Return what ran; see `SparseLM.get_model_info`."""
        return {"sparseattn": finished(self.tally.record())}
