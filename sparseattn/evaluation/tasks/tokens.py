"""Text to tokens and back, for a model with a tokenizer or with bytes as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARK = "sparseattn-prompt"  # stands for the prompt in a chat template


def turns(question: str, lead: str) -> tuple[str, str]:
    """A question in a chat: the end of the user's turn, and how the model's own begins."""
    return (question[: -len(lead)].rstrip(), lead.lstrip()) if lead else (question, "")


class Tokens:
    """Tokens of a transformers tokenizer, or bytes where it is None.

    The parts of a prompt are tokenised apart, so that both protocols feed the same tokens.

    Args:
        tokenizer: as `load_model` gives it.
        chat: put prompts into the tokenizer's chat template, as the turn of a user who is to be answered.

    Attributes:
        start: tokens before any text.
        before, after: tokens before and behind a prompt, `start` among them.

    Raises:
        ValueError: `chat` without a chat template.
    """

    def __init__(self, tokenizer: Any, chat: bool = False) -> None:
        self.tokenizer = tokenizer
        first = None if tokenizer is None else tokenizer.bos_token_id
        # Some tokenizers know a token for the beginning of a text and yet put none there.
        self.start = [first] if first is not None and first in tokenizer("")["input_ids"] else []
        self.before, self.after = self.start, self.ids("")
        if chat:
            if tokenizer is None or not tokenizer.chat_template:
                raise ValueError("the model's tokenizer has no chat template; ask it without --chat")
            turn = [{"role": "user", "content": MARK}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            self.before, self.after = map(self.ids, text.split(MARK))

    @property
    def spare(self) -> int:
        """Tokens that a prompt has besides its own."""
        return len(self.before) + len(self.after)

    def asked(self, question: str, lead: str) -> list[int]:
        """The tokens behind a context: `question`, which ends with `lead`, the beginning of an answer.

        In a chat template the lead is the model's own beginning of its turn: there a model goes on with it, in the
        user's turn it would begin anew.
        """
        if not self.after:
            return self.ids(question)
        users, begun = turns(question, lead)
        return [*self.ids(users), *self.after, *self.ids(begun)]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without any that mark its beginning or end."""
        if self.tokenizer is None:
            return list(text.encode())
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def text(self, ids: Sequence[int]) -> str:
        """The text of generated tokens; broken UTF-8 shows as U+FFFD."""
        if self.tokenizer is None:
            return bytes(ids).decode(errors="replace")
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
