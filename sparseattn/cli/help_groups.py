"""A command whose help shows its options in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand


def grouped(groups: Mapping[str, Sequence[str]]) -> type[TyperCommand]:
    """Return a class of commands: title of a group -> names of the parameters in it; others come last, as Options."""

    class GroupedCommand(TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            """Write arguments, then the options group by group."""
            sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{title: [] for title in groups}}
            title_of = {name: title for title, names in groups.items() for name in names}
            for parameter in self.get_params(ctx):
                if (line := parameter.get_help_record(ctx)) is not None:
                    argument = parameter.param_type_name == "argument"
                    title = "Arguments" if argument else title_of.get(str(parameter.name), "Options")
                    sections.setdefault(title, []).append(line)
            for title, lines in sections.items():
                if lines:
                    with formatter.section(title):
                        formatter.write_dl(lines)

    return GroupedCommand
