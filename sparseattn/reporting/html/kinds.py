"""The kinds of records that the page shows, in the order of its sections: a new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparseattn.reporting.html import bench, eval_section, inspect_section, layers, recall, recommended
from sparseattn.reporting.html.folders import Check, Record
from sparseattn.reporting.html.views import Section

_EVERY = (recommended, bench, layers, inspect_section, recall, eval_section)
# Name of a file -> what makes a section of its records, and what refuses a line of it.
KINDS: dict[str, Callable[[Sequence[Record]], Section]] = {kind.FILE: kind.section for kind in _EVERY}
CHECKS: dict[str, Check] = {kind.FILE: kind.check for kind in _EVERY}
