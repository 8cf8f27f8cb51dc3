"""Benchmarks' prompts in a chat: as turns, in the user's turn, with the answer begun, or never."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from sparseattn.evaluation.tasks.base import Chat, Example
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.run import ending, scored
from sparseattn.evaluation.tasks.served import ServerPass
from sparseattn.evaluation.tasks.thoughts import answer_in
from sparseattn.evaluation.tasks.tokens import Tokens
from tests.evaluation.layouts.lines import LONGBENCH, LONGBENCH_TEMPLATES, MRCR, TURNS, read, write


class Letters:
    """A tokenizer of code points, with a template that puts a role before each turn and a bar behind it."""

    bos_token_id = None
    chat_template = "yes"

    def __init__(self, first: str = "", last: str = "a:", times: int = 1) -> None:
        self.first, self.last, self.times = first, last, times

    def __call__(self, text: str, **more: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def apply_chat_template(
        self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool, **asked: Any
    ) -> str:
        assert asked["enable_thinking"] is False
        if any(a["role"] == b["role"] for a, b in itertools.pairwise(turns)):
            raise RuntimeError("roles alternate")
        said = "".join(f"{turn['role'][0]}:{turn['content'] * self.times}|" for turn in turns)
        return asked["strftime_now"](self.first) + said + self.last * add_generation_prompt

    def decode(self, ids: list[int], **more: Any) -> str:
        return "".join(map(chr, ids))


def text_of(example: Example, chat: bool = True) -> tuple[str, str]:
    tokens = Tokens(Letters(), chat)
    context, question = tokens.parts(example)
    return "".join(map(chr, context)), "".join(map(chr, question))


def test_a_conversation_is_read_up_to_its_last_turn(tmp_path: Path) -> None:
    (example,) = read(write(tmp_path / "m.jsonl", MRCR), chat=True).examples
    context, question = text_of(example)
    assert context == "u:write a line about lamps|a:A lamp is warm.|u:"
    assert question == "Prepend aB3 to the 1st line about lamps.|a:"
    limit = Prompt.of(example, Tokens(Letters(), True)).limit
    assert limit == 2 * len(example.target) + 8, "twice the right answer's tokens and 8"


def test_a_template_that_does_not_take_the_turns_is_a_sentence(tmp_path: Path) -> None:
    odd = {**MRCR, "prompt": json.dumps([TURNS[0], TURNS[2]])}
    (example,) = read(write(tmp_path / "m.jsonl", odd), chat=True).examples
    with pytest.raises(ValueError, match="the model's chat template does not take the conversation: roles alternate"):
        text_of(example)


def test_some_tasks_are_never_put_in_a_chat(tmp_path: Path) -> None:
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(LONGBENCH_TEMPLATES))
    path = write(tmp_path / "l.jsonl", LONGBENCH, {**LONGBENCH, "dataset": "lcc"})
    qasper, lcc = read(path).examples
    assert text_of(qasper) == ("u:Article: The lamp is kept by Ada.", "\n\nQ: Who keeps the lamp?\nA:|a:")
    assert text_of(lcc) == text_of(lcc, chat=False) == ("Go on.\nThe lamp is kept by Ada.", "Next:\n")


def test_the_answer_begins_in_the_models_turn() -> None:
    example = Example("t", "C", "Q? \nIt is", ("a",), "all", chat=Chat("Q? ", "It is"))
    assert text_of(example) == ("u:C", "Q? |a:It is"), "as it stands: white space too"
    assert text_of(example, chat=False) == ("C", "Q? \nIt is")
    ours = Example("t", "C", "Q? It is", ("a",), "all", lead=" It is")
    assert text_of(ours) == ("u:C", "Q?|a:It is")


def test_a_server_is_sent_the_turns(tmp_path: Path) -> None:
    class Server:
        name, model, url, version = "s", "m", "http://x", None

    (mrcr,) = read(write(tmp_path / "m.jsonl", MRCR), chat=True).examples
    tokens = Tokens(Letters(), True)
    asked = ServerPass(Server(), tokens, chat=True, concurrency=1)  # type: ignore[arg-type]
    question = asked._question(Prompt.of(mrcr, tokens))
    assert [*question.before, ("user", question.prompt)] == [(turn["role"], turn["content"]) for turn in TURNS]
    assert question.begun == ""
    assert not question.ended("a line\n"), "the answer goes on to its limit"
    never = Example("t", "C", "Q?", ("a",), "all", chat=None)
    assert asked._question(Prompt.of(never, tokens)).begun is None, "as plain text"


def test_templates_get_one_day_and_say_the_turn_once() -> None:
    tokens = Tokens(Letters("%d %b %Y "), True)
    assert "".join(map(chr, tokens.before)) == "26 Jul 2024 u:", "another day would be another prompt"
    assert not Prompt.of(Example("t", "C", "Q", ("a",), "all"), tokens).thoughts_begun
    with pytest.raises(ValueError, match="has the user's turn 2 times: ask without --chat"):
        Tokens(Letters(times=2), True)


def test_a_prompt_that_is_never_in_a_chat_keeps_its_beginning_where_it_is_cut() -> None:
    example = Example("t", "".join(map(str, range(100))), "Q", ("a",), "all", chat=None)
    tokens = Tokens(Letters(first="a long beginning "), True)
    cut = Prompt.of(example, tokens).shortened(80, tokens)
    assert cut.example is not None
    assert cut.example.context == "".join(map(chr, cut.context)) != example.context


def test_thoughts_are_no_answer() -> None:
    example = Example("t", "C", "Q", ("71432",), "all")
    tokens = Tokens(Letters(last="a:<think>\n"), True)
    assert Prompt.of(example, tokens).thoughts_begun
    never = Prompt.of(Example("t", "C", "Q", ("71432",), "all", chat=None), tokens)
    assert not never.thoughts_begun, "it is no chat"
    assert not ending(example, True)("Let me think.\n")
    assert ending(example)("71432\n")
    for response, begun, right in (
        ("<think>\n71432?\n</think>\n\nNo.", False, 0.0),
        ("<think>\nNo.\n</think>\n\nIt is 71432.", False, 1.0),
        ("No, 5.\n</think>71432", True, 1.0),
        ("\n71432 perhaps", True, 0.0),
        ("71432", False, 1.0),
    ):
        assert scored(example, response, begun)["score"] == right, response
        assert scored(example, response, begun)["response"] == response
    assert [answer_in(text) for text in ("<think>\nno", "<think>a</think>b", "b")] == ["", "b", "b"]
