"""The byte model's built-in traces of 2,048 tokens instead of 8,192, which take a sixteenth of the attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseattn.evaluation import builtin_traces

TOKENS = 2048


def use(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have built-in traces be short, and lie in the folder."""
    patch.setenv("SPARSEATTN_CACHE", str(folder))
    patch.setattr(builtin_traces, "TOKENS", TOKENS)


def fill(folder: Path) -> None:
    """Make them there: `once("short-traces", fill)`."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, folder)
        for name in builtin_traces.BYTES:
            builtin_traces.builtin_trace(name)
