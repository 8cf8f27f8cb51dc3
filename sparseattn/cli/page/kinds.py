"""The kinds of records that the page shows, in the order of its sections: a new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparseattn.cli.page import answers, bench, layers, needs, recall, recommended
from sparseattn.cli.page.folders import Record
from sparseattn.cli.page.views import Section

# Name of a file -> what makes a section of its records.
KINDS: dict[str, Callable[[Sequence[Record]], Section]] = {
    kind.FILE: kind.section for kind in (recommended, bench, layers, needs, recall, answers)
}
