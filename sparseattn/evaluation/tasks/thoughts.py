"""Models that think aloud before they answer: their thoughts are no part of the answer."""

from __future__ import annotations

OPENED, ENDED = "<think>", "</think>"


def answer_in(response: str, begun: bool = False) -> str:
    """Return what of a response so far is the answer: what is behind the thoughts, "" as long as these go on.

    Args:
        response: as the model wrote it.
        begun: whether the chat template has begun the thoughts.
    """
    _, ended, answer = response.partition(ENDED)
    if ended:
        return answer
    return "" if begun or response.lstrip().startswith(OPENED) else response
