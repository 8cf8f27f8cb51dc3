"""Plans: roles that were chosen for one model, with what they were made for and what was measured; a value, and a file.

The file, format version 1, is JSON:

    format    "sparseattn-plan"
    version   1
    name      what tables call it; without one, the file's name
    model     object: the model's `name` and the `fingerprint` of its weights, which is checked
    sink      rows, as in `KVCache`
    window    rows, likewise
    layers    as in a file of roles (`roles`)
    made      object: texts and their hashes, the bound, what was predicted and verified, machine, versions

`sparseattn recommend` makes them.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sparseattn.roles.roles import Given, Roles, check_layers, numbered

FORMAT, VERSION = "sparseattn-plan", 1


class Plan(Roles):
    """Roles for the layers of one model.

    Args:
        layers, name: as of `Roles`.
        model: "name" of the model, and "fingerprint" of its weights (`roles.fingerprint.fingerprint`).
        sink, window: rows that every query reads, with which it was measured.
        made: what it was made for and what was found, as JSON holds it.

    Raises:
        ValueError: what `Roles` refuses, no fingerprint, or rows below 0.
    """

    FORMAT, VERSION = FORMAT, VERSION
    KEYS = ("format", "version", "name", "model", "sink", "window", "layers", "made")
    KIND = "plan"

    def __init__(
        self,
        layers: Mapping[int, Given | Sequence[Given]] | Sequence[Given | Sequence[Given]],
        name: str = "plan",
        *,
        model: Mapping[str, str],
        sink: int = 4,
        window: int = 64,
        made: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(layers, name)
        _check_made_for(model)
        for what, rows in (("sink", sink), ("window", window)):
            if type(rows) is not int or rows < 0:
                raise ValueError(f"{what} of a plan is rows, 0 or more, got {reprlib.repr(rows)}")
        self.model, self.sink, self.window, self.made = dict(model), sink, window, dict(made or {})

    def label(self) -> str:
        """Its name in tables."""
        return f"plan {self.name}"

    def check_model(self, fingerprint: str, name: str, *others: str) -> None:
        """ValueError where the weights of the model `name` are not those that the plan was made for; `others` are
        further fingerprints that they may have."""
        _check_weights(self.name, self.model, fingerprint, name, *others)

    def check_rows(self, sink: int, window: int) -> None:
        """ValueError where a sink and a window are not those that the plan was measured with."""
        if (sink, window) != (self.sink, self.window):
            raise ValueError(
                f"plan {self.name} was measured with a sink of {self.sink} and a window of {self.window} rows, got "
                f"{sink} and {window}: give it those"
            )

    def record(self) -> dict[str, Any]:
        """Return what `save` writes."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "model": self.model,
            "sink": self.sink,
            "window": self.window,
            "layers": self.records(),
            "made": self.made,
        }

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], trusted: Collection[str] = (), weights: tuple[str, str] | None = None
    ) -> Plan:
        """Read a file, as `Roles.load`.

        Args:
            path, trusted: as there.
            weights: fingerprint and name of the model that it must be for (`check_model`), which is asked before
                anything that the file names is imported; None: not asked.

        Raises:
            ValueError: see `Roles.load`; a plan for other weights.
            OSError: it cannot be read.
        """
        return cls._read(path, trusted, weights)

    @classmethod
    def _of(cls, record: Any, name: str, trusted: Collection[str], weights: tuple[str, str] | None = None) -> Plan:
        cls.check_format(record)
        made = record.get("made", {})
        if not isinstance(made, dict):
            raise ValueError(f"made is an object, got {reprlib.repr(made)}")
        for key in ("model", "sink", "window"):
            if key not in record:
                raise ValueError(f"it says nothing of {key}")
        layers, name = numbered(record.get("layers")), record.get("name", name)
        if weights is not None:
            _check_made_for(record["model"])
            _check_weights(name, record["model"], *weights)
        check_layers(record["layers"], trusted)
        return cls(
            layers,
            name,
            model=record["model"],
            sink=record["sink"],
            window=record["window"],
            made=made,
        )


def _check_made_for(model: Any) -> None:
    """ValueError for what says not which model a plan was made for."""
    if not isinstance(model, Mapping) or not all(isinstance(model.get(key), str) for key in ("name", "fingerprint")):
        raise ValueError(
            f'the model of a plan is {{"name": ..., "fingerprint": ...}}, both texts, got {reprlib.repr(model)}'
        )


def _check_weights(plan: str, model: Mapping[str, str], fingerprint: str, name: str, *others: str) -> None:
    """See `Plan.check_model`, of the plan of a name that was made for a model."""
    if model["fingerprint"] not in (fingerprint, *others):
        raise ValueError(
            f"plan {plan} was made for the weights of {model['name']} ({model['fingerprint']}), and {name} has others "
            f"({fingerprint}): make one for it with `sparseattn recommend --model {name}`"
        )
