"""Servers as an engine: each is handed the same prompts whole, several at once, and answers by its own attention."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from sparseattn.core.activity import Activity
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import WHOLE, Key
from sparseattn.evaluation.tasks.run import ending, scored
from sparseattn.evaluation.tasks.thoughts import answer_in
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.serving.metrics import MetricsError, served_activity
from sparseattn.serving.openai_client import Server
from sparseattn.serving.questions import Answer, Question, ServerError

AHEAD = 2  # prompts that are made, for each that a server is asked at once: making one must not leave a server idle


class Served:
    """Compares servers, one after the other, so that two on one machine do not slow each other.

    Args:
        servers: the one that others are compared with first.
        tokens: whose tokens prompts are counted in.
        chat: whether prompts are turns of a user in a chat.
        concurrency: requests at a server at once.
    """

    protocols = (WHOLE,)

    def __init__(self, servers: Sequence[Server], tokens: Tokens, chat: bool, concurrency: int) -> None:
        self.servers = servers
        self.passes = [ServerPass(server, tokens, chat, concurrency) for server in servers]
        self.positions = min((server.positions for server in servers if server.positions is not None), default=None)

    def check(self, tokens: int, what: str, remedy: str = "") -> None:
        """ServerError where a server says that it takes fewer tokens."""
        for server in self.servers:
            if server.positions is not None and tokens > server.positions:
                raise ServerError(
                    f"the server {server.name} takes {server.positions} tokens, {what} takes {tokens}{remedy}"
                )


class ServerPass:
    """One server, as what is compared and as the pass that asks it."""

    written = where = None

    def __init__(self, server: Server, tokens: Tokens, chat: bool, concurrency: int) -> None:
        self.server, self.tokens, self.chat, self.concurrency = server, tokens, chat, concurrency
        self.label, self.source = server.name, f"{server.model} at {server.url}"
        self.compared = [self]
        self._before: Activity | None = None
        self.facts = {
            "url": server.url,
            "served_model": server.model,
            "server_version": server.version,
            "concurrency": concurrency,
        }

    def measure(self, prompts: Iterable[Prompt], known: Collection[Key]) -> Generator[dict[str, Any], None, None]:
        """Asks, as long as there are prompts; an answer that fails ends it, behind those that are there by then.

        Raises:
            ServerError: out of reach, refused, or broken off, again and again where it may pass.
        """
        self._before = self._counted()
        coming = (prompt for prompt in prompts if self._key(prompt) not in known)
        waiting: dict[Future[Answer], Prompt] = {}
        with self.server.asking(self.concurrency) as ask:
            while True:
                while len(waiting) < AHEAD * self.concurrency and (prompt := next(coming, None)) is not None:
                    waiting[ask(self._question(prompt))] = prompt
                if not waiting:
                    return
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in sorted(
                    done, key=lambda answered: answered.exception() is not None
                ):  # keep what is there first
                    answer = future.result()
                    yield self._record(waiting.pop(future), answer)

    def _counted(self) -> Activity | None:
        """Return what the server has counted so far; None where it is no server of `sparseattn serve`."""
        try:
            return served_activity(self.server.url)
        except MetricsError:
            return None

    def _ran(self) -> dict[str, Any] | None:
        """Return what the server has done since the pass began, whoever asked it, as records have it."""
        now = None if self._before is None else self._counted()
        return None if self._before is None or now is None else (now - self._before).to_dict()

    def _key(self, prompt: Prompt) -> Key:
        (key,) = prompt.keys((WHOLE,), self.compared)
        return key

    def _question(self, prompt: Prompt) -> Question:
        example = prompt.example
        assert example is not None
        turn, ended = example.turn() if self.chat else None, ending(example, prompt.thoughts_begun)
        if turn is None:
            return Question(prompt.name, example.context + example.question, None, prompt.limit, ended)
        text = turn.user if turn.before else example.context + turn.user
        return Question(prompt.name, text, turn.begun, prompt.limit, ended, turn.before)

    def _record(self, prompt: Prompt, answer: Answer) -> dict[str, Any]:
        """With seconds to the first token and to the end, tokens of the response, and attempts that it took."""
        assert prompt.example is not None
        spoken = answer_in(answer.text, prompt.thoughts_begun)
        thought = answer.text[: len(answer.text) - len(spoken)]
        response = thought + whole_line(spoken) if prompt.example.one_line else answer.text
        first = answer.first_seconds
        facts = {
            "seconds": round(answer.seconds, 4),
            "first_token_seconds": None if first is None else round(first, 4),
            "new_tokens": self.tokens.count(answer.text),
            "attempts": answer.attempts,
            "activity": self._ran(),
        }
        return prompt.record(
            self._key(prompt), scored(prompt.example, response, prompt.thoughts_begun), facts, self.facts
        )


def whole_line(text: str) -> str:
    """Return a text as far as its first line that holds something, and that line's end."""
    line = re.match(r"\s*[^\n]*\n?", text)
    assert line is not None
    return line[0]
