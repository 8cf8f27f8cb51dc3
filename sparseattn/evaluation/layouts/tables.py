"""Rows of parquet files and of the Arrow files that `datasets` saves, read with pyarrow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = 64  # of a batch: rows of millions of letters


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table as JSON would hold them: texts, numbers, lists, objects and None.

    Raises:
        ImportError: pyarrow is missing.
        OSError: no such file.
        ValueError: naming the file: it is cut off or no such table, or a column holds what JSON does not.
    """
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise ImportError("tables need pyarrow: pip install 'sparseattn[datasets]'") from error
    with open(path, "rb") as file:
        try:
            if path.suffix == ".parquet":
                batches = parquet.ParquetFile(file).iter_batches(ROWS)
            else:
                batches = iter(ipc.open_stream(file))
            for batch in batches:
                for row in batch.to_pylist():
                    yield {name: _plain(name, value) for name, value in row.items()}
        except (pyarrow.ArrowException, OSError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise ValueError(f"{path} is cut off, or no {path.suffix.removeprefix('.')} file: {why}") from None


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None  # pandas writes a missing number so
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, list):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(name, item) for key, item in value.items()}
    if hasattr(value, "isoformat"):  # a date
        return value.isoformat()
    raise ValueError(f"the column {name} holds {type(value).__name__}, not text, numbers or lists of them")
