"""What is asked of a server and what it answers: its address, a question, an answer, or an error in one sentence."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass


class ServerError(ValueError):
    """A server failed or refused; the message is one sentence."""


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Args:
        name: its name in tables and records.
        url: the API's URL, up to `/v1`.
        model: the server's name of the model; None: the only one that it has.
    """

    name: str
    url: str
    model: str | None = None

    @classmethod
    def of(cls, text: str) -> Address:
        """`NAME=URL#MODEL`; without a name the name is the URL. A URL without a path gets `/v1`.

        Raises:
            ValueError: no http or https URL, or one with a password or a query, which records would hold.
        """
        head, equals, rest = text.partition("=")
        name, url = (head, rest) if equals and "://" not in head else ("", text)
        try:
            parts = urllib.parse.urlsplit(url)
            whole = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            whole = False
        if not whole or (equals and not name and "://" not in head):
            raise ValueError(f"--endpoint is NAME=URL or URL, such as dense=http://127.0.0.1:8000/v1, got {text!r}")
        if parts.username is not None or parts.query:
            raise ValueError("--endpoint takes no password and no query, which records would show: use OPENAI_API_KEY")
        plain = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
        return cls(name or plain, plain, parts.fragment or None)


@dataclass(frozen=True)
class Question:
    """A question for a server.

    Args:
        what: it is, for the sentences of errors.
        prompt: the text to go on with.
        begun: None: `prompt` is plain text. Else it is the turn of a user in a chat, and the answer begins so.
        limit: tokens of an answer at most. A server that sends more pieces of text is cut there.
        ended: whether an answer so far is whole, though the server goes on.
        before: turns of a chat before the user's, each a role and its content.
    """

    what: str
    prompt: str
    begun: str | None
    limit: int
    ended: Callable[[str], bool]
    before: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer of a server.

    Args:
        text: as far as it was read.
        first_seconds: until the first text came; None: none came.
        seconds: until the answer was whole.
        attempts: that it took; the times are those of the last.
    """

    text: str
    first_seconds: float | None
    seconds: float
    attempts: int
