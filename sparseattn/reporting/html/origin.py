"""The last section: every setting, version and machine that the records name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sparseattn.cost_model.environment import machine, versions
from sparseattn.recommend.records import KEY as KIND
from sparseattn.reporting.html import views
from sparseattn.reporting.html.folders import Record, RecordSource
from sparseattn.reporting.html.views import Section

Facts: TypeAlias = "Mapping[str, Any]"  # as a record of them would hold them

# What was measured, of any kind: all else that a line holds says how.
MEASURED = {
    *("mean", "worst", "heads", "steps", "methods", "left_out", "missed_by_both", "spearman"),
    *("score", "ruler", "response", "answers", "rows", "context", "bytes_share", "prompt_tokens", "sparse_calls"),
    *("dense_calls", "decode_seconds", "seconds", "first_token_seconds", "new_tokens", "kl", "same_top", "nll"),
    *("nll_difference", "scored_tokens", "select_ms", "build_seconds", "index_bytes_per_key", "attended", "prompt"),
    *("points", "rounds", "verified", "predicted", "cost", "activity", "prefill_seconds", "index_seconds", "attempts"),
}
APART = ("versions", "machine", "trace_meta")  # in groups of their own
SETTINGS = "settings"
OF_SETTINGS = (SETTINGS, "made")  # lines of `recommend.jsonl` that say how the others were measured
MOST = 12  # different values that are listed


def section(by_kind: Mapping[str, Sequence[RecordSource]], more: Mapping[str, Facts]) -> Section:
    """Return a group for each file, each trace, each set of versions and machine, and for what was made here."""
    groups: dict[str, dict[str, str]] = {}
    traces: dict[str, dict[str, str]] = {}
    made_by: dict[str, list[str]] = {}  # versions and machine -> files made by them
    for source in (source for sources in by_kind.values() for source in sources):
        groups[str(source.path)] = _settings(source.records)
        for record in source.records:
            if isinstance(meta := record.get("trace_meta"), Mapping):
                name, facts = f"trace {record.get('trace', record.get('source', ''))}", _flat(meta)
                other = traces.setdefault(name, facts) != facts  # another folder's trace of the name
                traces.setdefault(f"{name} of {source.path}" if other else name, facts)
        for record in [record for record in source.records if "versions" in record] or source.records[:1]:
            by = json.dumps([record.get("versions"), record.get("machine")], sort_keys=True)
            files = made_by.setdefault(by, [])
            if str(source.path) not in files:
                files.append(str(source.path))
    for by, files in made_by.items():
        known = [facts for facts in json.loads(by) if facts]
        facts = {name: text for facts in reversed(known) for name, text in _flat(facts).items()}
        groups[f"versions and machine of {', '.join(files)}"] = facts or {"": "the records do not say"}
    for name, own in more.items():
        groups[name] = _flat({**own, "versions": versions(), "machine": machine()})
    view = views.Facts("As the records name them", {**groups, **traces})
    return Section("origin", "Settings and versions", (), [view])


def _settings(records: Sequence[Record]) -> dict[str, str]:
    """Return name -> its values over the lines."""
    flat = [
        _flat({k: v for k, v in record.items() if k not in MEASURED and k not in APART})
        for record in records
        if record.get(KIND, SETTINGS) in OF_SETTINGS
    ]
    names = dict.fromkeys(name for settings in flat for name in settings)
    settings = {"records": f"{len(records):,}"}
    for name in names:
        values = list(dict.fromkeys(settings[name] for settings in flat if name in settings))
        more = f" and {len(values) - MOST} more" if len(values) > MOST else ""
        settings[name] = "; ".join(values[:MOST]) + more
    return settings


def _flat(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return a record without objects: those within as `outer inner`; lists as they are written."""
    out: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            out |= {f"{name} {inner}" if name != "settings" else inner: text for inner, text in _flat(value).items()}
        elif isinstance(value, list):
            out[name] = ", ".join(map(_text, value)) or "none"
        else:
            out[name] = _text(value)
    return out


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)
