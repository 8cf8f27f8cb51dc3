"""A server's tokenizer, by its `/tokenize`, and whether it counts as another does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparseattn.serving.openai_client import Server
from sparseattn.serving.questions import ServerError

PROBE = "The old ferry passed the quiet harbour at noon, in 1984."  # to see how a server counts


class ServedTokenizer:
    """A server's tokenizer, with as much of the interface of transformers' as the tasks use.

    Raises:
        ServerError: the server has no `/tokenize` of vLLM's form.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        bare, marked = server.ids(PROBE), server.ids(PROBE, special=True)
        if not bare or not marked:
            raise ServerError(
                f"the server {server.name} does not say how it counts tokens (it has no /tokenize such as vLLM's): say "
                f"with --model whose tokenizer makes the prompts"
            )
        self.bos_token_id = marked[0] if marked[1 : 1 + len(bare)] == bare else None
        self.chat_template = server.turn([{"role": "user", "content": PROBE}]) is not None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        if not text:  # some servers refuse to count nothing
            return {"input_ids": [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []}
        ids = self._server.ids(text, add_special_tokens)
        if ids is None:
            raise ServerError(f"the server {self._server.name} no longer says how it counts tokens")
        return {"input_ids": ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._server.text(ids)

    def apply_chat_template(self, turn: Sequence[Mapping[str, str]], **_: Any) -> str:
        """Return the text of a chat, up to where the model is to answer."""
        return self._server.text(self._server.turn(turn) or [])


def counts_alike(server: Server, count: Callable[[str], int]) -> tuple[int, int] | None:
    """Tokens of a sentence by `count` and by the server, where they differ; None: they agree, or it does not say."""
    ids, ours = server.ids(PROBE), count(PROBE)
    return None if not ids or len(ids) == ours else (ours, len(ids))
