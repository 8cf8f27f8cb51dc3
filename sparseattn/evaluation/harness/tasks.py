"""The tasks of a run of lm-eval: requests task by task, and which tasks ask for log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

GENERATES = "generate_until"  # the kind of a task that scores what is generated, and lm-eval's default


def by_task(requests: Sequence[Any], ask: Callable[[str, list[Any]], list[Any]]) -> list[Any]:
    """Return the answers to requests, asked task by task, in the order of the requests.

    Args:
        requests: lm-eval's.
        ask: answers requests of a task of this name.
    """
    numbers_of: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        numbers_of.setdefault(str(request.task_name), []).append(number)
    answers: list[Any] = [None] * len(requests)
    for task, numbers in numbers_of.items():
        for number, answer in zip(numbers, ask(task, [requests[number] for number in numbers]), strict=True):
            answers[number] = answer
    return answers


def asking_logprobs(manager: Any, tasks: Sequence[str | dict[str, Any]]) -> list[str]:
    """Return the names of tasks that ask for log-probabilities, of groups and tags too, each once.

    Args:
        manager: lm-eval's `TaskManager`, whose index says it without a dataset being loaded. Tasks that are code of
            their own say it when they are asked.
        tasks: names, paths and configurations, as lm-eval has resolved them.
    """
    return list(dict.fromkeys(_asking(manager.task_index, tasks)))


def leaves(index: Any, tasks: Sequence[Any]) -> Iterator[str]:
    """Yield the names of the tasks that are asked, those of groups and tags in place of these; `index` is lm-eval's."""
    for task, config in _asked(index, tasks):
        yield str(config.get("task") or task)


def _asking(index: Any, tasks: Sequence[Any]) -> Iterator[str]:
    for task, config in _asked(index, tasks):
        inner = config.get("task")
        if config.get("class") is None and config.get("output_type", GENERATES) != GENERATES:
            yield str(inner or task)
        elif isinstance(task, dict) and isinstance(inner, str) and "output_type" not in config:
            yield from _asking(index, [inner])


def _asked(index: Any, tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each task that is asked and its configuration, those of groups and tags in place of these."""
    for task in tasks:
        entry = index.get(task) if isinstance(task, str) else None
        config = task if isinstance(task, dict) else getattr(entry, "cfg", None) or {}
        inner = config.get("task")
        if isinstance(inner, list):
            yield from _asked(index, inner)
        elif entry is not None and entry.kind.name == "TAG":
            yield from _asked(index, [name for name, other in index.items() if task in other.tags])
        else:
            yield task, config
