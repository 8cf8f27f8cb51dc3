"""Text to tokens and back, for a model with a tokenizer or with bytes as tokens."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.thoughts import OPENED
from sparseattn.serving.questions import ServerError

MARK = "sparseattn-prompt"  # stands for the prompt in a chat template
# What templates ask for besides: the same day always, as another would make another prompt, and no thinking aloud.
ASKED = {"strftime_now": datetime.date(2024, 7, 26).strftime, "enable_thinking": False}


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
        self.chat, self._thoughts_begun = chat, False
        if chat:
            if tokenizer is None or not tokenizer.chat_template:
                raise ValueError("the model's tokenizer has no chat template; ask it without --chat")
            self.before, self.after = self._around(())
            self._thoughts_begun = str(tokenizer.decode(self.after)).rstrip().endswith(OPENED)

    @property
    def spare(self) -> int:
        """Tokens that a prompt has besides its own."""
        return len(self.before) + len(self.after)

    def parts(self, example: Example) -> tuple[list[int], list[int]]:
        """Return the tokens of a context, with what stands before any text, and those of its question.

        In a chat template the question ends the user's turn, and the beginning of an answer is the model's own
        beginning of its turn: there a model goes on with it, in the user's turn it would begin anew.

        Raises:
            ValueError: a chat template that does not take the turns before the question.
        """
        turn = example.turn()
        if not self.chat or turn is None:
            return [*self.start, *self.ids(example.context)], self.ids(example.question)
        before, after = (self.before, self.after) if not turn.before else self._around(turn.before)
        context = [] if turn.before else self.ids(example.context)
        return [*before, *context], [*self.ids(turn.user), *after, *self.ids(turn.begun)]

    def thoughts_begun(self, example: Example) -> bool:
        """Return whether the chat template, if the example is put in it, begins the model's thoughts."""
        return self._thoughts_begun and example.turn() is not None

    def first(self, example: Example) -> int:
        """Return how many tokens stand before the text of a context."""
        return len(self.before if self.chat and example.turn() is not None else self.start)

    def _around(self, turns: Sequence[tuple[str, str]]) -> tuple[list[int], list[int]]:
        """Return the tokens before and behind the user's turn that comes after other turns."""
        said = [{"role": role, "content": content} for role, content in (*turns, ("user", MARK))]
        try:
            text = str(self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **ASKED))
        except ServerError:
            raise
        except Exception as error:  # the template's own, whatever it raises
            raise ValueError(f"the model's chat template does not take the conversation: {error}") from None
        before, *behind = text.split(MARK)
        if len(behind) != 1:
            raise ValueError(f"the model's chat template has the user's turn {len(behind)} times: ask without --chat")
        return self.ids(before), self.ids(behind[0])

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without any that mark its beginning or end."""
        if self.tokenizer is None:
            return list(text.encode())
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens; broken UTF-8 shows as U+FFFD."""
        if self.tokenizer is None:
            return bytes(ids).decode(errors="replace")
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
