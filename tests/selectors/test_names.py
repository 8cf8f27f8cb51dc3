"""A method's label is the shortest text that makes it again, its repr the text with every argument."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest

from sparseattn import SELECTORS, LowBit, Quest, Selector, TwoStage, Window, make_selector
from sparseattn.selectors.identity import as_typed, identity
from sparseattn.selectors.registry import parsed
from tests.cases import CASES

AROUND = {"twostage": "pages", **dict.fromkeys(("tailed", "topp", "freekv", "kascade", "vattention"), "inner")}
FORMS = ("lowbit:bits=1,page=16", "quest:page=8,int8=True", "tailed:inner=[lowbit:bits=1,scales=8],rows=64")


class Texts(Window):
    """A user's, whose arguments take what texts can hold."""

    def __init__(
        self, words: str = "", either: str | int = 0, real: float = 0.5, some: list[int] | None = None
    ) -> None:
        self.words, self.either, self.real, self.some = words, either, real, some


def same(selector: Selector) -> None:
    """The texts of a selector make one with the same arguments."""
    for text in (str(selector), selector.label(), repr(selector)):
        again = make_selector(text)
        assert (type(again), str(again), repr(again)) == (type(selector), str(selector), repr(selector))


@pytest.mark.parametrize("name", SELECTORS)
def test_a_registered_method_is_its_name(name: str) -> None:
    made = make_selector(name)
    assert str(made) == name
    same(made)
    for argument, parameter in inspect.signature(type(made)).parameters.items():
        if isinstance(getattr(made, argument), Selector):
            assert str(getattr(made, argument)) == parameter.default, "a default is written as labels are"


def test_every_method_within_every_other() -> None:
    made = 0
    for (outer, part), inner in itertools.product(AROUND.items(), (*SELECTORS, *FORMS)):
        try:
            selector = make_selector(f"{outer}:{part}=[{inner}]")
        except ValueError:
            continue  # one that the outer method refuses
        same(selector)
        made += 1
    assert made > 100


def test_every_form_of_the_laws() -> None:
    for case in CASES:
        for make in filter(None, (case.make, case.exhaustive)):
            same(make())


def test_a_label_leaves_out_what_is_so_anyway() -> None:
    assert str(LowBit(bits=1, page=16)) == "lowbit:bits=1,page=16"
    assert f"{Quest()}" == "quest"
    assert repr(Quest()) == "quest:page=16,group=sum,int8=False"
    assert str(TwoStage(Quest(page=8), times=4)) == "twostage:pages=[quest:page=8],times=4"
    assert str(TwoStage("lowbit")) == "twostage:pages=lowbit"
    assert make_selector("ivf:probes=3").label(knob=False) == "ivf"


@pytest.mark.parametrize(
    "value",
    [
        "/a/b c.safetensors",
        "a,b",
        "[a]",
        "'quoted'",
        '"',
        "it's",
        "a'b,\"c\\",
        "16",
        "None",
        "",
        " ",
        "a=b",
        "tab\t",
        "x\n",
        "\\",
    ],
)
def test_texts_are_quoted_only_if_they_would_be_read_otherwise(value: str, tmp_path: Path) -> None:
    for selector in (Texts(value), Texts(either=value), TwoStage(Texts(value)), TwoStage(TwoStage(Texts(value)))):
        same(selector)
    assert make_selector(str(Texts(value))).arguments()["words"] == value
    plain = value in ("/a/b c.safetensors", "it's", "a=b", "\\")
    assert str(Texts(either=value)) == f"{__name__}:Texts:either={value if plain else repr(value)}"


@pytest.mark.parametrize(
    ("value", "text"), [(-3, "-3"), (2.5e-7, "2.5e-07"), (float("inf"), "1e999"), ([1, 2], "[1,2]")]
)
def test_values_that_are_no_texts(value: Any, text: str) -> None:
    assert as_typed(value) == text
    same(Texts(some=value) if isinstance(value, list) else Texts(real=float(value)))


def test_the_parts_of_a_text() -> None:
    assert parsed("twostage:pages=[quest:page=8,int8=True],times=4") == (
        "twostage",
        [("pages", "[quest:page=8,int8=True]"), ("times", "4")],
    )
    assert parsed("mine:Own:words='a,b]',x") == ("mine:Own", [("words", "'a,b]'"), ("x", None)])
    assert identity(Texts) == f"{__name__}:Texts"
