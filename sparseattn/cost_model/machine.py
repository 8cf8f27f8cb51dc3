"""A model of the machine: how long the launches of a step take, by bandwidth, arithmetic and fixed costs.

A launch takes a fixed time and then what its bytes need at the memory's bandwidth or its operations at the speed of its
code, whichever is longer: the roofline, https://doi.org/10.1145/1498765.1498785. CPUs are measured
(`sparseattn.cost_model.measure`); GPUs are known by their data sheets (`sparseattn.cost_model.data_sheet`), and what
follows from these is a prediction.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparseattn.core.step_cost import KINDS, Cost, Launch
from sparseattn.cost_model.data_sheet import CPU, DataSheet, published
from sparseattn.utils.cache_folder import cache_folder
from sparseattn.utils.files import write_atomic
from sparseattn.utils.json_fields import FieldError, Flag, Maybe, Number, Object, Text, Values
from sparseattn.utils.json_text import JsonError, parse
from sparseattn.utils.suggest import did_you_mean

FORMAT = 2  # of the file
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HALF = ("bfloat16", "float16")
IN_FLOAT32 = ("product", "names", "walk")  # kinds of launches, whatever the dtype of the keys


_TINY = 5e-324  # the least that is above 0
_MOST = 1e300
_SPEED = Object(
    {"launch": Number(0, _MOST)}, {"flops": Maybe(Number(_TINY, _MOST)), "entry": Number(0, _MOST)}, closed=True
)
FIELDS = Object(
    {
        "name": Text(),
        "bandwidth": Number(_TINY, _MOST),
        "device": Text(),
        "predicted": Flag(),
        "source": Text(),
        "about": Object(),
        "speeds": Values(Values(_SPEED), 1),
    },
    {"memory": Maybe(Number(_TINY, _MOST))},
)


class MachineError(ValueError):
    """A machine that is not known, or a file that is no profile of one, in one sentence."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one kind of launch in one dtype.

    Args:
        launch: seconds that it takes however little it does.
        flops: operations per second; None where arithmetic does not bind.
        entry: seconds for each entry, see `core.step_cost.KINDS`.
    """

    launch: float
    flops: float | None = None
    entry: float = 0.0

    def seconds(self, launch: Launch, bandwidth: float) -> float:
        """Return what one launch, or `count` equal ones, takes, of a memory of so many bytes per second."""
        work = launch.entries * self.entry
        if self.flops is not None:
            work += launch.flops / self.flops
        return launch.count * self.launch + max(launch.bytes / bandwidth, work)


@dataclass(frozen=True, slots=True)
class Machine:
    """What predicts a step's time.

    Args:
        name: of the machine.
        bandwidth: bytes per second, of the memory that the KV cache lies in.
        speeds: dtype's name -> kind of launch -> its speed.
        device: "cpu" or "cuda": a GPU runs no method that searches in host memory.
        predicted: whether figures are published ones, so that every time is a prediction; False: they were measured.
        source: where they are from.
        about: what else is known of a measurement: its date, cores, versions, load.
        memory: bytes that the model's weights, the KV cache and the index must fit into; None where it is not known.
    """

    name: str
    bandwidth: float
    speeds: Mapping[str, Mapping[str, Speed]]
    device: str
    predicted: bool
    source: str
    about: Mapping[str, Any] = field(default_factory=dict)
    memory: float | None = None

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Machine:
        """Return a machine by name (`cpu` as it was measured here, or a GPU of `GPUS`), or by the file of its profile.

        Raises:
            MachineError: neither; or `cpu` before it was measured.
        """
        if isinstance(name, str) and name in GPUS:
            return GPUS[name]
        path = measured_path() if name == CPU else Path(name)
        if not path.is_file():
            if name == CPU:
                raise MachineError(f"this machine has not been measured: run `sparseattn machine`, which writes {path}")
            known = (CPU, *GPUS)
            raise MachineError(
                f"a machine is one of {', '.join(known)}, or the file of a profile, got {str(name)!r}"
                f"{did_you_mean(str(name), known)}"
            )
        try:
            return cls.of(parse(path.read_bytes()))
        except (OSError, JsonError, MachineError) as error:
            raise MachineError(f"{path} is no profile of a machine: {error}") from None

    @classmethod
    def of(cls, record: Any) -> Machine:
        """Return the machine of a profile: a GPU's data sheet, or what was measured, as `as_dict` gives it.

        Raises:
            MachineError: any other value.
        """
        if not isinstance(record, dict) or not record:
            raise MachineError("it is a JSON object: a GPU's data sheet, or what `sparseattn machine` wrote")
        measured = "speeds" in record or "format" in record
        if measured and record.get("format") != FORMAT:
            raise MachineError(f"a measured profile has format {FORMAT}: measure it anew by `sparseattn machine`")
        try:
            if not measured:
                return cls.of_sheet(DataSheet.of(record))
            FIELDS.check(record)
        except FieldError as error:
            raise MachineError(str(error)) from None
        facts = {name: record[name] for name in ("name", "bandwidth", "device", "predicted", "source", "about")}
        facts["memory"] = record.get("memory")
        speeds = {
            dtype: {kind: Speed(**speed) for kind, speed in kinds.items()} for dtype, kinds in record["speeds"].items()
        }
        return cls(**facts, speeds=speeds)

    @classmethod
    def of_sheet(cls, sheet: DataSheet) -> Machine:
        """Return a GPU that reaches what its data sheet says: tensor cores for 16-bit products, float32 for others."""
        speeds = {
            dtype: {
                kind: Speed(sheet.launch, sheet.tensor if dtype in HALF and kind not in IN_FLOAT32 else sheet.vector)
                for kind in KINDS
            }
            for dtype in DTYPES
        }
        return cls(sheet.name, sheet.bandwidth, speeds, "cuda", True, sheet.source, memory=sheet.memory)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        """Write the profile, whole or not at all."""
        write_atomic(path, (json.dumps(self.as_dict(), indent=1) + "\n").encode())

    def of_dtype(self, name: str) -> Mapping[str, Speed]:
        """Return the speeds of a dtype; MachineError for one that was not measured."""
        if name not in self.speeds:
            raise MachineError(f"{self.name} has speeds for {', '.join(self.speeds)}, not for {name}")
        return self.speeds[name]

    def speed(self, launch: Launch, dtype: torch.dtype) -> Speed:
        """Of a launch; MachineError for a dtype or a kind that was not measured."""
        kinds = self.of_dtype(str(dtype).removeprefix("torch."))
        if launch.kind not in kinds:
            raise MachineError(f"{self.name} has no speed of {launch.kind!r}: measure it anew")
        return kinds[launch.kind]

    def seconds(self, cost: Cost) -> float:
        """Return what a step takes.

        Raises:
            MachineError: a dtype or a kind of launch that the machine's speeds do not tell; a method that searches in
                host memory, on a GPU.
        """
        if cost.host and self.device != "cpu":
            raise MachineError(f"the method searches in host memory, so {self.name} does not run it: take a CPU")
        return sum(self.launch_seconds(launch, cost.dtype) for launch in cost.launches)

    def product_seconds(self, read: float, flops: float, dtype: torch.dtype) -> float:
        """Return what products with `read` bytes of weights take, without their launches: the roofline.

        Raises:
            MachineError: a dtype that the machine's speeds do not tell.
        """
        peak = self.speed(Launch("dense"), dtype).flops
        return max(read / self.bandwidth, 0.0 if peak is None else flops / peak)

    def launch_seconds(self, launch: Launch, dtype: torch.dtype) -> float:
        """Return what one launch, or `count` equal ones, takes."""
        return self.speed(launch, dtype).seconds(launch, self.bandwidth)


def measured_path() -> Path:
    """Where the profile of the machine that this runs on lies."""
    return cache_folder() / "machine" / "cpu.json"


GPUS = {sheet.name: Machine.of_sheet(sheet) for sheet in published()}
