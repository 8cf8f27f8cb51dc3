"""Which methods `bench` measures: those named, or with `all` every one that can run on a trace; why others cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sparseattn.cache.selection_checks import ContractError
from sparseattn.cli.command import raised_here
from sparseattn.core.budget import Budget
from sparseattn.roles.roles import Method, Roles
from sparseattn.selectors.base import Selector
from sparseattn.selectors.baselines.native import NATIVE, Native
from sparseattn.selectors.registry import SELECTORS, make_selector

ALL = "all"


@dataclass(frozen=True)
class MethodsOfTrace:
    """What is measured of a trace.

    Args:
        methods: each with its budgets.
        left_out: label of a method that is not measured -> why, as an error says it.
        other_budgets: label of a method that is not measured at every budget -> a clause that says at which instead,
            and why.
    """

    methods: list[tuple[Method, list[Budget]]]
    left_out: dict[str, str]
    other_budgets: dict[str, str]


@dataclass(frozen=True)
class ChosenMethods:
    """The methods that `--selector` and `--roles` ask for.

    Args:
        methods: each once, in the order given, roles last; those of `all` in the order of `SELECTORS`.
        optional: the reprs of those that came by `all` alone: one that cannot run is left out, and why is said.
        left_out: what of `all` cannot be made here, by its name -> why, as an error says it.
    """

    methods: list[Method]
    optional: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, specs: Iterable[str], roles: Sequence[Roles] = ()) -> ChosenMethods:
        """Return the methods of texts; ValueError as `make_selector` raises it, for what is not of `all`."""
        methods: dict[str, Method] = {}
        named: set[str] = set()
        left_out: dict[str, str] = {}
        for spec in specs:
            for name in SELECTORS if spec == ALL else (spec,):
                try:
                    method = Native() if name == NATIVE else make_selector(name)
                except (ValueError, ImportError) as error:
                    if spec != ALL or not raised_here(error):
                        raise
                    left_out[name] = str(error)
                    continue
                methods.setdefault(repr(method), method)
                if spec != ALL:
                    named.add(repr(method))
        return cls([*methods.values(), *roles], frozenset(set(methods) - named), left_out)

    @property
    def named(self) -> list[Method]:
        """The methods that did not come by `all` alone."""
        return [method for method in self.methods if repr(method) not in self.optional]

    def of_trace(
        self, check: Callable[[Method, Sequence[Budget]], object], budgets: Sequence[Budget]
    ) -> MethodsOfTrace:
        """Return the methods that pass `check`, and why others do not.

        A method of `all` whose span is more rows than some of the budgets has its span in their place.

        Raises:
            ValueError: a method that was asked for by its name does not pass, or none does.
        """
        fitting, left_out, other_budgets = [], dict(self.left_out), {}
        for method in self.methods:
            fitting_budgets = list(budgets)
            span = method.span if repr(method) in self.optional and isinstance(method, Selector) else 1
            if unfit := [budget for budget in budgets if isinstance(budget, int) and budget < span]:
                fitting_budgets = list(dict.fromkeys([span, *(budget for budget in budgets if budget not in unfit)]))
            try:
                check(method, fitting_budgets)
            except ValueError as error:
                if not self.forgives(method, error):
                    raise
                left_out[method.label()] = str(error)
                continue
            fitting.append((method, fitting_budgets))
            if unfit:
                other_budgets[method.label()] = (
                    f"reads {span} rows at a time, so it is measured at a budget of {span} in place of "
                    f"{', '.join(map(str, unfit))}"
                )
        if self.methods and not fitting:
            raise ValueError(next(iter(left_out.values())))
        return MethodsOfTrace(fitting, left_out, other_budgets)

    def forgives(self, method: Method, error: ValueError) -> bool:
        """Return whether to leave the method out: it came by `all`, and refuses the trace in a sentence.

        A broken contract is a fault, and so is what a library raises.
        """
        return repr(method) in self.optional and not isinstance(error, ContractError) and raised_here(error)
