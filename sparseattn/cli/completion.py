"""What a shell offers at TAB for the values of options: names from tables of text, so that no TAB waits for torch.

Each function has the form of typer's `autocompletion`: it takes the word that stands at the cursor and returns the
words that fit, some with a phrase about them, which zsh and fish show. For a word that no name fits (a file, a class
of one's own) it returns nothing, and the shell then offers files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from sparseattn.cost_model.data_sheet import CPU, published
from sparseattn.cost_model.known_models import named
from sparseattn.evaluation.builtin_traces import BUILTIN
from sparseattn.models.packaged import PACKAGED, REFERENCE
from sparseattn.selectors.methods import METHODS
from sparseattn.traces.texts import TEXTS

Offer: TypeAlias = "str | tuple[str, str]"  # a word, or a word and a phrase about it
LONGEST = 50  # characters of a phrase: fish takes what typer wraps for further words


def one_of(names: Iterable[str]) -> Callable[[str], list[Offer]]:
    """Return what offers `names`."""
    return described(dict.fromkeys(names, ""))


def described(phrases: Mapping[str, str]) -> Callable[[str], list[Offer]]:
    """Return what offers names, each with a phrase about it."""
    offers: list[Offer] = [
        (name, textwrap.shorten(phrase, LONGEST, placeholder=" ...")) if phrase else name
        for name, phrase in phrases.items()
    ]

    def complete(incomplete: str) -> list[Offer]:
        return [offer for offer in offers if _word(offer).startswith(incomplete)]

    return complete


def several_of(names: Iterable[str]) -> Callable[[str], list[Offer]]:
    """Return what offers `names` after each comma, for an option such as `--task passkey,kv`."""
    known = list(names)

    def complete(incomplete: str) -> list[Offer]:
        before, comma, last = incomplete.rpartition(",")
        given = before.split(",")
        return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in given]

    return complete


def selectors(*more: str) -> Callable[[str], list[Offer]]:
    """Return what offers every method, and the further words of a command."""
    return described({**{name: METHODS[name].reads for name in sorted(METHODS)}, **dict.fromkeys(more, "")})


def _word(offer: Offer) -> str:
    return offer if isinstance(offer, str) else offer[0]


models = described({REFERENCE: "the model that ships", **{name: model.about for name, model in PACKAGED.items()}})
packaged = described({name: model.about for name, model in PACKAGED.items()})
texts = described({name: text.about for name, text in TEXTS.items()})
traces = described({name: trace.about for name, trace in BUILTIN.items()})
machines = described(
    {CPU: "as `sparseattn machine` measured it", **{gpu.name: f"{gpu.memory / 1e9:.0f} GB" for gpu in published()}}
)
shapes = one_of(named())
