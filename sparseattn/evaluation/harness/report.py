"""What a run of lm-eval says of itself when it has ended: kept here, as lm-eval's command gives nothing back."""

from __future__ import annotations

from typing import Any

_records: list[dict[str, Any]] = []


def finished(record: dict[str, Any]) -> dict[str, Any]:
    """Keep the record of a run that has ended, and return it."""
    _records.append(record)
    return record


def taken() -> list[dict[str, Any]]:
    """Return the records that were kept, oldest first, and forget them."""
    records = list(_records)
    _records.clear()
    return records
