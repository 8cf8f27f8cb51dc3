"""Every system of the sources as a row: of the registries, of roles, and those that are not here, with why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.evidence.markdown import linked
from scripts.evidence.toml import read
from sparseattn.codecs.table import CODECS
from sparseattn.selectors.methods import METHODS

PLACE = Path(__file__).with_name("systems.toml")
LAWS = "the laws alone"


def systems(place: Path = PLACE) -> list[dict[str, Any]]:
    """Rows of kind "here", with what they are held against, and of kind "left", with why they are not built.

    Raises:
        ValueError: a method or codec without an entry, or an entry of none.
    """
    told = read(place)
    found = []
    for what, known, page in (("methods", METHODS, "methods.md"), ("codecs", CODECS, "codecs.md")):
        entries = told[what]
        if odd := set(entries) ^ set(known):
            raise ValueError(f"{place.name} has an entry of each of the {what}, no more and no less: {sorted(odd)}")
        for name, row in known.items():
            anchor = f"#{getattr(row, 'section', '') or name}" if what == "methods" else ""
            own = {"system": f"[`{name}`]({page}{anchor})", "paper": linked(row.paper), "here": what.removesuffix("s")}
            found.append(_here(own | entries[name]))
    found += [_here({**role, "paper": linked(role["paper"])}) for role in told["roles"]]
    return found + [{**one, "paper": linked(one["paper"]), "kind": "left"} for one in told["left"]]


def _here(row: dict[str, Any]) -> dict[str, Any]:
    return {"against": LAWS, "equal": "", **row, "kind": "here", "where": f"`tests/{row['tests']}`"}
