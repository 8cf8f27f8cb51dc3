"""What `eval` was asked for: options as values, checked before anything is read, loaded or made."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sparseattn.cache import input_checks
from sparseattn.cache.kv_cache import GROUP, check_seal
from sparseattn.cli.common import decimals, integers
from sparseattn.core.budget import budget_label, budget_of, budget_order, parse_budget
from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.compared import PROTOCOLS
from sparseattn.evaluation.tasks.registry import TASKS
from sparseattn.evaluation.tasks.run import Method
from sparseattn.roles.roles import Method as Sparse
from sparseattn.roles.roles import Roles
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import make_selector

MOST_LAYERS = 9999  # far beyond any model's
ALL_LAYERS = "all"  # of `--sparse-layers`: every one that attends to the whole context


@dataclass(frozen=True, eq=False)
class Wanted:
    """What to measure, whatever the model and the files.

    Args:
        tasks: names in `TASKS`, and `AGREEMENT`.
        lengths: of generated prompts and of windows of a text, in tokens, ascending.
        depths: where needles lie.
        samples: prompts for each length and depth, or windows for each length.
        seed: of the first prompt.
        protocols: of `PROTOCOLS`.
        methods: full attention first.
        last: tokens of a window over which agreement is measured.
        answer_tokens: of an answer at most; None: twice the right ones and 8, or `OWN_TOKENS` of the user's prompts.
        max_length: of the user's prompts with their answers; None: nothing is cut.
    """

    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float]
    samples: int
    seed: int
    protocols: Sequence[str]
    methods: Sequence[Method]
    last: int
    answer_tokens: int | None
    max_length: int | None

    @classmethod
    def of(
        cls,
        *,
        tasks: str,
        lengths: str,
        depths: str,
        samples: int,
        seed: int,
        protocols: str,
        selectors: Sequence[str],
        budgets: str,
        roles: Sequence[Roles],
        layers: Sequence[str],
        rounding: Sequence[int | None] = (None,),
        seal: int | None = None,
        last: int,
        answer_tokens: int | None,
        max_length: int | None,
    ) -> Wanted:
        """Of the options as they were given.

        Raises:
            ValueError: naming the option, a name that is not known or a number out of its range.
        """
        counts = sorted(set(integers(lengths, "--lengths") or []))
        positive(
            {
                "--lengths": counts[0],
                "--samples": samples,
                "--last": last,
                "--answer-tokens": answer_tokens,
                "--max-length": max_length,
            }
        )
        return cls(
            tasks=names(tasks, "--task", (*TASKS, AGREEMENT)),
            lengths=counts,
            depths=list(dict.fromkeys(decimals(depths, "--depths"))),
            samples=samples,
            seed=seed,
            protocols=names(protocols, "--protocol", PROTOCOLS),
            methods=methods(selectors, budgets, counts, layers, roles, rounding, seal),
            last=last,
            answer_tokens=answer_tokens,
            max_length=max_length,
        )

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.samples)

    @property
    def queries(self) -> bool:
        """Whether any method learns from the prefill's queries."""
        return any(method.selector is not None and method.selector.learns for method in self.methods)


def positive(numbers: Mapping[str, int | None]) -> None:
    """ValueError naming the option of a number below 1."""
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{option} is 1 or more, got {number}")


def one_of(option: str, name: str, known: Collection[str]) -> None:
    """ValueError naming the option for a name that is not among `known`."""
    if name not in known:
        raise ValueError(f"{option} is one of {', '.join(known)}, got {name!r}")


def names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """`"a,b"` as a list without repetitions. Raises ValueError for a name that is not among `known`."""
    found = list(dict.fromkeys(text.split(","))) if text else []
    for name in found:
        if name not in known:
            raise ValueError(f"{option} takes names from {', '.join(known)}, separated by commas, got {name!r}")
    return found


def layer_set(text: str) -> tuple[int, ...] | None:
    """`"0-3,9"` as numbers in order; None for "all". Raises ValueError naming the option."""
    if text == ALL_LAYERS:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and bool(dash) == bool(last)) or (
            dash and int(first) > int(last)
        ):
            raise ValueError(
                f'--sparse-layers takes layers and ranges of them separated by commas, such as "0-9,12", or '
                f"{ALL_LAYERS}, got {text!r}"
            )
        if int(last or first) > MOST_LAYERS:
            raise ValueError(f"--sparse-layers are numbers up to {MOST_LAYERS}, got {text!r}")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def methods(
    specs: Sequence[str],
    text: str,
    counts: Sequence[int],
    layers: Sequence[str] = (ALL_LAYERS,),
    roles: Sequence[Roles] = (),
    rounding: Sequence[int | None] = (None,),
    seal: int | None = None,
) -> list[Method]:
    """Full attention, and every selector, and all roles, with rows of all `rounding` (bits of `KVCache`), in every set
    of layers at every budget; what does not look at its budget, once. A method that rows of few bits do not serve goes
    without them, where rows as they come are asked for too.

    Raises:
        ValueError: no such selector or budget, a budget below a selector's span, two selectors of one label, one that
            no asked number of bits serves, or a `seal` below a unit.
    """
    asked = list(dict.fromkeys(parse_budget(part) for part in text.split(",")))
    asked.sort(key=lambda budget: budget_order(budget, counts[-1]))
    sets = list(dict.fromkeys(map(layer_set, layers)))
    found = [Method()]
    labels: dict[str, str] = {}
    compared: list[Sparse] = [*map(make_selector, specs), *roles]
    for one in compared:
        what = f"{one!r} of {one.source()}"
        if labels.setdefault(one.label(), what) != what:
            raise ValueError(f"two selectors are called {one.label()}: {labels[one.label()]} and {what}")
        selectors = [role.selector for role in one.distinct()] if isinstance(one, Roles) else [one]
        served = _served(selectors, rounding)
        if seal is not None:
            for selector, bits in itertools.product(selectors, served):
                check_seal(selector, seal, bits)
        # Outside the budgets, as an index is built for a set of layers.
        for where, bits in itertools.product(sets, served):
            for budget in asked if one.uses_budget else [None]:
                if isinstance(one, Roles):
                    one.check_budget(budget, counts[0])
                else:
                    budget_of(one, budget, counts[0])
                found.append(Method(one, budget, budget_label(budget) if one.uses_budget else None, where, bits))
    return list({(method.label, method.written, method.layers): method for method in found}.values())


def _served(selectors: Sequence[Selector], rounding: Sequence[int | None]) -> list[int | None]:
    """Those bits of rows that serve all selectors; ValueError where there are none."""
    served: list[int | None] = []
    refused: list[ValueError] = []
    for bits in rounding:
        try:
            for selector in selectors if bits is not None else []:
                input_checks.roundable(selector, bits or 0, GROUP, False)
            served.append(bits)
        except ValueError as error:
            refused.append(error)
    if not served:
        raise refused[0]
    return served
