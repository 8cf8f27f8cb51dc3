"""Expressions over the columns of rows, and templates of them.

`1e3 * seconds.step.median` is a number of the rows at hand: a name is the value that a column has in all of them, or
the mean of the known ones. `max(kl)` and the other `FUNCTIONS` take whole columns. A template is text with
``{expression:format}`` in it; a part in square brackets is left out where a value in it is not known.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.markdown import shown
from sparseattn.evaluation.intervals import student, wilson

Row: TypeAlias = "Mapping[str, Any]"
Column: TypeAlias = "list[Any]"

FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
OPTIONAL = re.compile(r"\[([^\[\]{}]*\{[^\[\]]*)\]")
OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Unknown(LookupError):
    """A value that the rows do not have."""


def known(values: Iterable[Any]) -> Column:
    """Without None and NaN."""
    return [value for value in values if value is not None and value == value]


def mean(values: Iterable[Any]) -> Any:
    """The value that all have, or the mean; None of nothing.

    Raises:
        ValueError: the values are words that differ.
    """
    every = known(values)
    if not every or all(value == every[0] for value in every):
        return every[0] if every else None
    if any(isinstance(value, (str, list, bool)) for value in every):
        raise ValueError(f"these differ and have no mean: {every[0]!r} and {next(v for v in every if v != every[0])!r}")
    return sum(every) / len(every)


class Scope:
    """The rows that an expression is about.

    Args:
        rows: those.
        base: those that `base(...)` is about.
        alike: a name is of a column whose values are the same in all rows, as in a caption.
    """

    def __init__(self, rows: Sequence[Row], base: Sequence[Row] = (), alike: bool = False) -> None:
        self.rows, self.base, self.alike = rows, base, alike

    def value(self, name: str) -> Any:
        """What a column says of these rows: what all of them have, or the mean."""
        values = self.column(name)
        if self.alike and any(value != values[0] for value in values):
            raise ValueError(f"the rows differ in {name}: say mean(...), min(...) or whose it is")
        return mean(values)

    def column(self, name: str) -> Column:
        """A column of these rows, None where a row has none; `recovered` stands for `mean.recovered`, too."""
        return column(self.rows, name)


def column(rows: Sequence[Row], name: str) -> Column:
    if not any(name in row for row in rows):
        name = f"mean.{name}"
    if rows and not any(name in row for row in rows):
        raise LookupError(f"there is no column {name.removeprefix('mean.')!r} in {', '.join(sorted(rows[0]))}")
    return [row.get(name) for row in rows]


def by(keys: Column, values: Column) -> Column:
    """The means of a column's values by those of another."""
    return [mean(value for at, value in zip(keys, values, strict=True) if at == key) for key in dict.fromkeys(keys)]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "by": by,
    "count": lambda values: len(known(values)),
    "distinct": lambda values: list(dict.fromkeys(map(str, known(values)))),
    "each": lambda values: values,
    "fewest": lambda keys, values: min(len({v for k, v in zip(keys, values, strict=True) if k == key}) for key in keys),
    "first": lambda values: values[0],
    "has": lambda values, word: any(word in str(value) for value in values),
    "high": lambda values: (student(known(values)) or (None, None))[1],
    "last": lambda values: values[-1],
    "low": lambda values: None if (found := student(known(values))) is None else max(found[0], 0.0),
    "max": lambda *values: max(_flat(values), default=None),
    "mean": lambda *values: mean(_flat(values)),
    "min": lambda *values: min(_flat(values), default=None),
    "missed_one": lambda count, side: wilson([1.0] * (count - 1) + [0.0])[side],  # of as many prompts
    "part_high": lambda values: wilson(known(values))[1],  # of shares, each prompt's its own
    "part_low": lambda values: wilson(known(values))[0],
    "round": lambda value, digits: round(value, digits),
    "size": lambda values: len(values[0] if isinstance(values[0], list) else values),
    "sum": lambda *values: sum(_flat(values)),
}


def _flat(values: Iterable[Any]) -> Column:
    return known(one for value in values for one in (_flat(value) if isinstance(value, list) else [value]))


def evaluate(expression: str, scope: Scope, values: Mapping[str, Column] | None = None) -> Any:
    """The value of an expression; `values` are columns of other rows, by names of their own.

    Raises:
        LookupError: a column or a function is not there.
        ValueError: it is no such expression.
    """
    return _value(_parsed(expression.strip()), scope, values or {})


@functools.cache
def _parsed(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no expression: {error.msg}") from error


def _name(node: ast.AST) -> str | None:
    """`mean.recall@10` as one name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _name(node.value)):
        return f"{before}.{node.attr}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) and (before := _name(node.left)):
        return f"{before}@{ast.unparse(node.right)}"
    return None


def _value(node: ast.expr, scope: Scope, values: Mapping[str, Column]) -> Any:
    if name := _name(node):
        return mean(values[name]) if name in values else scope.value(name)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, scope, values)
    if isinstance(node, ast.BoolOp):
        found = [_value(one, scope, values) for one in node.values]
        return all(found) if isinstance(node.op, ast.And) else any(found)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, scope, values), _value(node.right, scope, values)
        return None if left is None or right is None else OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare):
        sides = [_value(one, scope, values) for one in (node.left, *node.comparators)]
        return all(OPERATORS[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "base":
            return mean(column(scope.base, _name(node.args[0]) or ""))
        if node.func.id in FUNCTIONS:
            return FUNCTIONS[node.func.id](*(_argument(one, scope, values) for one in node.args))
    raise ValueError(f"an expression cannot have {ast.unparse(node)!r} in it")


def _argument(node: ast.expr, scope: Scope, values: Mapping[str, Column]) -> Any:
    if name := _name(node):
        return values[name] if name in values else scope.column(name)
    return _value(node, scope, values)


def filled(template: str, scope: Scope, names: Mapping[str, str]) -> str:
    """A template with the values of its expressions; empty where one outside of brackets is not known.

    Args:
        template: see the module.
        scope: what its expressions are about.
        names: what the format `name` writes for a value.
    """

    def fill(words: str) -> str:
        return FIELD.sub(lambda found: _shown(evaluate(found[1], scope), found[2] or "", names), words)

    def part(found: re.Match[str]) -> str:
        try:
            return fill(found[1])
        except Unknown:
            return ""

    try:
        return fill(OPTIONAL.sub(part, template))
    except Unknown:
        return ""


def _shown(value: Any, form: str, names: Mapping[str, str]) -> str:
    if value is None or value == [None] or value == []:
        raise Unknown
    if form == "name":
        return names.get(str(value), str(value))
    return ", ".join(
        "-" if one is None else shown(one, form) for one in (value if isinstance(value, list) else [value])
    )
