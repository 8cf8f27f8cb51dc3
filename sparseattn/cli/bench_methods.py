"""Which methods `bench` measures: those named, or with `all` every one that can run on a trace; why others cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sparseattn.cache.selection_checks import ContractError
from sparseattn.cli.common import raised_here
from sparseattn.core.budget import Budget
from sparseattn.roles.roles import Method, Roles
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import SELECTORS, make_selector

ALL = "all"


@dataclass(frozen=True)
class Fitting:
    """What is measured of a trace.

    Args:
        methods: each with its budgets.
        lacking: label of a method that is not measured -> why, as an error says it.
        other: label of a method that is not measured at every budget -> a clause that says at which instead, and why.
    """

    methods: list[tuple[Method, list[Budget]]]
    lacking: dict[str, str]
    other: dict[str, str]


@dataclass(frozen=True)
class Asked:
    """The methods that `--selector` and `--roles` ask for.

    Args:
        methods: each once, in the order given, roles last; those of `all` in the order of `SELECTORS`.
        optional: the reprs of those that came by `all` alone: one that cannot run is left out, and why is said.
        lacking: what of `all` cannot be made here, by its name -> why, as an error says it.
    """

    methods: list[Method]
    optional: frozenset[str] = frozenset()
    lacking: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, specs: Iterable[str], roles: Sequence[Roles] = ()) -> Asked:
        """Raises ValueError as `make_selector` does, for what is not of `all`."""
        found: dict[str, Method] = {}
        named: set[str] = set()
        lacking: dict[str, str] = {}
        for spec in specs:
            for name in SELECTORS if spec == ALL else (spec,):
                try:
                    method = make_selector(name)
                except (ValueError, ImportError) as error:
                    if spec != ALL or not raised_here(error):
                        raise
                    lacking[name] = str(error)
                    continue
                found.setdefault(repr(method), method)
                if spec != ALL:
                    named.add(repr(method))
        return cls([*found.values(), *roles], frozenset(set(found) - named), lacking)

    @property
    def named(self) -> list[Method]:
        """The methods that did not come by `all` alone."""
        return [method for method in self.methods if repr(method) not in self.optional]

    def fitting(self, check: Callable[[Method, Sequence[Budget]], object], budgets: Sequence[Budget]) -> Fitting:
        """The methods that pass `check`, and why others do not.

        A method of `all` whose span is more rows than some of the budgets has its span in their place.

        Raises:
            ValueError: a method that was asked for by its name does not pass, or none does.
        """
        fit, lacking, other = [], dict(self.lacking), {}
        for method in self.methods:
            mine = list(budgets)
            span = method.span if repr(method) in self.optional and isinstance(method, Selector) else 1
            if unfit := [budget for budget in budgets if isinstance(budget, int) and budget < span]:
                mine = list(dict.fromkeys([span, *(budget for budget in budgets if budget not in unfit)]))
            try:
                check(method, mine)
            except ValueError as error:
                if not self.forgives(method, error):
                    raise
                lacking[method.label()] = str(error)
                continue
            fit.append((method, mine))
            if unfit:
                other[method.label()] = (
                    f"reads {span} rows at a time, so it is measured at a budget of {span} in place of "
                    f"{', '.join(map(str, unfit))}"
                )
        if self.methods and not fit:
            raise ValueError(next(iter(lacking.values())))
        return Fitting(fit, lacking, other)

    def forgives(self, method: Method, error: ValueError) -> bool:
        """Whether the error is a reason to leave the method out: it came by `all`, and refuses the trace in a sentence.

        A broken contract is a fault, and so is what a library raises.
        """
        return repr(method) in self.optional and not isinstance(error, ContractError) and raised_here(error)
