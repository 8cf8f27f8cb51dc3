"""Python as a child process, which imports nothing from the folder that it is started in.

`python -m` puts the current folder first on the path: a `pip.py` or `json.py` that lies there would run in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

SAFE = "PYTHONSAFEPATH"  # in the environment: for the Pythons that a child starts in its turn; Python 3.10 ignores it
# For Python 3.10, which has no -P. `sys` is built in, so nothing is looked for before the current folder, "", is gone.
WITHOUT_FOLDER = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); import runpy; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
RUN = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", WITHOUT_FOLDER]


def module(name: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Return a command line that runs a module as `python OPTIONS -m NAME ARGUMENTS`, without the current folder."""
    return [sys.executable, *options, *RUN, name, *arguments]


def environment(around: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of such a child: `around`, and what keeps its own children from the current folder."""
    return {**around, SAFE: "1"}
