"""The page's heading: model, length of the context, how many methods, and on what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sparseattn.reporting.html.views import FULL, Section


def heading(sections: Sequence[Section], names: Mapping[str, str]) -> str | None:
    """Return "SmolLM2-135M, 8,192 tokens: 9 methods on prose, code, needles"; None where no section names a model.

    Args:
        sections: of the page.
        names: what people call a model, by the name that records have; others keep theirs.
    """
    subjects = [section.subject for section in sections]
    models = _each(names.get(model, model) for subject in subjects for model in subject.models)
    if not models:
        return None
    lengths = _each(tokens for subject in subjects for tokens in subject.tokens)
    methods = _each(method for section in sections for method in section.methods if method != FULL)
    where = _each(name for subject in subjects for name in subject.of)
    sizes = f", {'up to ' if len(lengths) > 1 else ''}{max(lengths):,} tokens" if lengths else ""
    counted = f"{len(methods)} method{'s' if len(methods) > 1 else ''}" if methods else "attention"
    return f"{', '.join(models)}{sizes}: {counted}" + (f" on {', '.join(where)}" if where else "")


def _each(values: Iterable) -> list:
    return list(dict.fromkeys(values))
