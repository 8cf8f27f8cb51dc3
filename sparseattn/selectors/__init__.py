"""Every method by name. A new method is a file, a line in `SELECTORS` and a line in `tests/cases.py`."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
from typing import Any, get_args, get_type_hints

from sparseattn.selectors.base import Rows, Selector
from sparseattn.selectors.bridge import QueryBridge
from sparseattn.selectors.clse import Clse
from sparseattn.selectors.doublesparsity import DoubleSparsity
from sparseattn.selectors.ellipsoid import Ellipsoid
from sparseattn.selectors.exact import Exact
from sparseattn.selectors.fier import Fier
from sparseattn.selectors.fitted import Fitted
from sparseattn.selectors.freekv import FreeKV
from sparseattn.selectors.h2o import H2O
from sparseattn.selectors.infinigen import InfiniGen
from sparseattn.selectors.infllm import InfLLM
from sparseattn.selectors.kascade import Kascade
from sparseattn.selectors.kdeformer import KDEformer
from sparseattn.selectors.kmeans import KMeans
from sparseattn.selectors.levels import Levels
from sparseattn.selectors.loki import Loki
from sparseattn.selectors.lowbit import LowBit
from sparseattn.selectors.magicpig import MagicPIG
from sparseattn.selectors.mean import Mean
from sparseattn.selectors.moments import Moments
from sparseattn.selectors.paged import PageSelector
from sparseattn.selectors.pagemass import PageMass
from sparseattn.selectors.pariskv import ParisKV
from sparseattn.selectors.pq import PQ
from sparseattn.selectors.pqcache import PQCache
from sparseattn.selectors.pyramidkv import PyramidKV
from sparseattn.selectors.quad import Quad
from sparseattn.selectors.quest import Quest
from sparseattn.selectors.random import Random
from sparseattn.selectors.recent import Recent
from sparseattn.selectors.reformer import Reformer
from sparseattn.selectors.retrieval import RetrievalAttention
from sparseattn.selectors.retroinfer import RetroInfer
from sparseattn.selectors.robustvamana import RobustVamana
from sparseattn.selectors.rocketkv import RocketKV
from sparseattn.selectors.saap import SAAP, PerfectBuckets
from sparseattn.selectors.selfindex import SelfIndex
from sparseattn.selectors.snapkv import SnapKV
from sparseattn.selectors.sparq import SparQ
from sparseattn.selectors.tailed import Tailed
from sparseattn.selectors.topp import TopP
from sparseattn.selectors.tova import TOVA
from sparseattn.selectors.twostage import TwoStage
from sparseattn.selectors.unique import Unique
from sparseattn.selectors.vattention import VAttention
from sparseattn.selectors.vector import HNSW, IVF, Flat
from sparseattn.selectors.window import Window

__all__ = [
    "H2O",
    "HNSW",
    "IVF",
    "PQ",
    "SAAP",
    "SELECTORS",
    "TOVA",
    "Clse",
    "DoubleSparsity",
    "Ellipsoid",
    "Exact",
    "Fier",
    "Fitted",
    "Flat",
    "FreeKV",
    "InfLLM",
    "InfiniGen",
    "KDEformer",
    "KMeans",
    "Kascade",
    "Levels",
    "Loki",
    "LowBit",
    "MagicPIG",
    "Mean",
    "Moments",
    "PQCache",
    "PageMass",
    "PageSelector",
    "ParisKV",
    "PerfectBuckets",
    "PyramidKV",
    "Quad",
    "QueryBridge",
    "Quest",
    "Random",
    "Recent",
    "Reformer",
    "RetrievalAttention",
    "RetroInfer",
    "RobustVamana",
    "RocketKV",
    "Rows",
    "Selector",
    "SelfIndex",
    "SnapKV",
    "SparQ",
    "Tailed",
    "TopP",
    "TwoStage",
    "Unique",
    "VAttention",
    "Window",
    "as_selector",
    "make_selector",
]

SELECTORS: dict[str, type[Selector]] = {
    "bridge": QueryBridge,
    "clse": Clse,
    "doublesparsity": DoubleSparsity,
    "ellipsoid": Ellipsoid,
    "exact": Exact,
    "fier": Fier,
    "flat": Flat,
    "freekv": FreeKV,
    "h2o": H2O,
    "hnsw": HNSW,
    "infinigen": InfiniGen,
    "infllm": InfLLM,
    "ivf": IVF,
    "kascade": Kascade,
    "kdeformer": KDEformer,
    "kmeans": KMeans,
    "loki": Loki,
    "lowbit": LowBit,
    "magicpig": MagicPIG,
    "mean": Mean,
    "moments": Moments,
    "pagemass": PageMass,
    "pariskv": ParisKV,
    "pq": PQ,
    "pqcache": PQCache,
    "pyramidkv": PyramidKV,
    "quad": Quad,
    "quest": Quest,
    "random": Random,
    "recent": Recent,
    "reformer": Reformer,
    "retrieval": RetrievalAttention,
    "retroinfer": RetroInfer,
    "robustvamana": RobustVamana,
    "rocketkv": RocketKV,
    "saap": SAAP,
    "selfindex": SelfIndex,
    "snapkv": SnapKV,
    "sparq": SparQ,
    "tailed": Tailed,
    "topp": TopP,
    "tova": TOVA,
    "twostage": TwoStage,
    "unique": Unique,
    "vattention": VAttention,
    "window": Window,
}

_SPEC = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?)(?::(?P<args>[A-Za-z_]\w*=.*))?")


def make_selector(spec: str) -> Selector:
    """The selector that a text names: `name[:arg=value,...]` or `package.module:Class[:arg=value,...]`.

    Values are Python literals; what is not one is a string (`quest:page=32,group=sum`). A value that is a selector
    itself, which its argument's annotation tells, is such a text again, in brackets if it has arguments, and brackets
    nest: `twostage:pages=lowbit,times=4`, `twostage:pages=[quest:page=8,int8=True],times=4`. A shell may want quotes
    around them. A module is imported, which runs its code with the rights of this process: take no such text from where
    you would take no program.

    Raises:
        ValueError: an unknown name or argument (with the nearest known one), brackets that do not match, or a value the
            selector refuses.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(
            f"{spec!r} is not a selector: write NAME or NAME:arg=value,arg=value, with NAME one of "
            f"{', '.join(SELECTORS)} or package.module:Class"
        )
    method = _find(match["name"])
    types = get_type_hints(method.__init__)
    known = list(inspect.signature(method).parameters)
    arguments: dict[str, Any] = {}
    for pair in _pairs(match["args"]) if match["args"] else []:
        name, equals, text = pair.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"{method.__name__} has no argument {name!r}{_nearest(name, known)}; "
                f"it takes {', '.join(known) or 'none'}"
            )
        if name in arguments:
            raise ValueError(f"{spec!r} gives {name!r} twice")
        arguments[name] = _value(method, name, text, types.get(name))
    try:
        selector = method(**arguments)
        repr(selector)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{spec!r}: {error}") from error
    return selector


def as_selector(given: Selector | str) -> Selector:
    """`given`, or the selector that it names (`make_selector`); ValueError for anything else."""
    made = make_selector(given) if isinstance(given, str) else given
    if not isinstance(made, Selector):
        raise ValueError(f'selector is a name ("quest") or an instance of a Selector, such as Quest(), got {made!r}')
    return made


def _pairs(text: str) -> list[str]:
    """`"a=1,b=[c:d=2,e=3]"` at the commas outside of brackets; ValueError where these do not match."""
    pairs, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth < 0:
            break
        if letter == "," and not depth:
            pairs.append("")
        else:
            pairs[-1] += letter
    if depth:
        what = "closes a bracket that it did not open" if depth < 0 else "leaves a bracket open"
        raise ValueError(f"{text!r} {what}: a selector with arguments, as a value, is name=[NAME:arg=value,...]")
    return pairs


def _value(method: type[Selector], name: str, text: str, kind: Any) -> Any:
    """`text` as the argument's annotated type; without a plain one, a Python literal, else the text itself."""
    if kind is Selector or Selector in get_args(kind):
        bracketed = text.startswith("[") and text.endswith("]")
        if "=" in text and not bracketed:
            raise ValueError(
                f"{method.__name__}'s {name} is a selector, whose arguments stand in brackets: {name}=[NAME:arg=value,"
                f"...], got {text!r}"
            )
        return make_selector(text[1:-1] if bracketed else text)
    if kind is str:
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool) and type(value) is not kind:
        raise ValueError(f"{method.__name__}'s {name} is of type {kind.__name__}, got {text!r}")
    return value


def _find(name: str) -> type[Selector]:
    if name in SELECTORS:
        return SELECTORS[name]
    module, colon, attribute = name.partition(":")
    if module in SELECTORS:
        raise ValueError(f"{name!r}: arguments are written {module}:name=value, got {attribute!r}")
    if not colon:
        raise ValueError(
            f"no selector is called {name!r}{_nearest(name, list(SELECTORS))}; known are {', '.join(SELECTORS)}, "
            f"and package.module:Class for your own"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"{name!r}: cannot import {module!r} ({error})") from error
    except AttributeError:
        raise ValueError(f"{name!r}: module {module!r} has no {attribute!r}") from None
    if not (inspect.isclass(found) and issubclass(found, Selector)) or inspect.isabstract(found):
        raise ValueError(f"{name!r} is not a concrete subclass of sparseattn.Selector")
    return found


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
