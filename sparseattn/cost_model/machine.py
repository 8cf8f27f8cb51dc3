"""A model of the machine: how long the launches of a step take, by bandwidth, arithmetic and fixed costs.

A launch takes a fixed time and then what its bytes need at the memory's bandwidth or its operations at the speed of its
code, whichever is longer: the roofline, https://doi.org/10.1145/1498765.1498785. CPUs are measured
(`sparseattn.cost_model.measure`); of GPUs here is what their data sheets say, and what follows from it is a prediction.
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
from sparseattn.utils.cache_folder import cache_folder
from sparseattn.utils.files import write_atomic
from sparseattn.utils.json_fields import FieldError, Flag, Maybe, Number, Object, Text, Values
from sparseattn.utils.json_text import JsonError, parse

FORMAT = 2  # of the file
CPU = "cpu"  # the name of the machine that was measured here
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
    }
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
        """What one launch, or `count` equal ones, takes, of a memory of so many bytes per second."""
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
    """

    name: str
    bandwidth: float
    speeds: Mapping[str, Mapping[str, Speed]]
    device: str
    predicted: bool
    source: str
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Machine:
        """By name (`cpu`: as it was measured here, `h100`, `h200`, `a100`), or a profile's file.

        Raises:
            MachineError: neither; or `cpu` before it was measured.
        """
        if isinstance(name, str) and name in GPUS:
            return GPUS[name]
        path = measured_path() if name == CPU else Path(name)
        if not path.is_file():
            if name == CPU:
                raise MachineError(f"this machine has not been measured: run `sparseattn machine`, which writes {path}")
            known = ", ".join((CPU, *GPUS))
            raise MachineError(f"a machine is one of {known}, or the file of a profile, got {str(name)!r}")
        try:
            return cls.of(parse(path.read_bytes()))
        except (OSError, JsonError, MachineError) as error:
            raise MachineError(f"{path} is no profile of a machine: {error}") from None

    @classmethod
    def of(cls, record: Any) -> Machine:
        """From `as_dict`; MachineError for anything else."""
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise MachineError(
                f"it is a JSON object with format {FORMAT}, as this release's `sparseattn machine` writes it"
            )
        try:
            FIELDS.check(record)
        except FieldError as error:
            raise MachineError(str(error)) from None
        held = {name: record[name] for name in ("name", "bandwidth", "device", "predicted", "source", "about")}
        speeds = {
            dtype: {kind: Speed(**one) for kind, one in kinds.items()} for dtype, kinds in record["speeds"].items()
        }
        return cls(**held, speeds=speeds)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        """Writes the profile, whole or not at all."""
        write_atomic(path, (json.dumps(self.as_dict(), indent=1) + "\n").encode())

    def of_dtype(self, name: str) -> Mapping[str, Speed]:
        """The speeds of a dtype; MachineError for one that was not measured."""
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
        """What a step takes.

        Raises:
            MachineError: a dtype or a kind of launch that the machine's speeds do not tell; a method that searches in
                host memory, on a GPU.
        """
        if cost.host and self.device != "cpu":
            raise MachineError(f"the method searches in host memory, so {self.name} does not run it: take a CPU")
        return sum(self.launch_seconds(launch, cost.dtype) for launch in cost.launches)

    def launch_seconds(self, launch: Launch, dtype: torch.dtype) -> float:
        """What one launch, or `count` equal ones, takes."""
        return self.speed(launch, dtype).seconds(launch, self.bandwidth)


def measured_path() -> Path:
    """Where the profile of the machine that this runs on lies."""
    return cache_folder() / "machine" / "cpu.json"


# Seconds of a launch in a CUDA graph that does next to nothing: "Getting Started with CUDA Graphs", NVIDIA 2019,
# https://developer.nvidia.com/blog/cuda-graphs/, 3.4 us for a kernel that runs for 2.9, on a V100.
GPU_LAUNCH = 3.4e-6
HALF = ("bfloat16", "float16")
IN_FLOAT32 = ("product", "names", "walk")  # whatever keys are


def _gpu(name: str, bandwidth: float, tensor: float, vector: float, source: str) -> Machine:
    """By a data sheet: `tensor` operations per second of 16-bit tensor cores, dense, `vector` ones in float32."""
    speeds = {
        dtype: {
            kind: Speed(GPU_LAUNCH, tensor if dtype in HALF and kind not in IN_FLOAT32 else vector) for kind in KINDS
        }
        for dtype in DTYPES
    }
    return Machine(name, bandwidth, speeds, "cuda", True, source)


GPUS = {
    # SXM5, 80 GB HBM3: 3.35 TB/s; 989 TFLOP/s bfloat16 dense (1,979 with sparsity), 67 in float32.
    "h100": _gpu(
        "h100", 3.35e12, 989e12, 67e12, "NVIDIA H100 Tensor Core GPU Datasheet (SXM), https://www.nvidia.com/h100"
    ),
    # SXM, 141 GB HBM3e: 4.8 TB/s; arithmetic as of the H100.
    "h200": _gpu(
        "h200", 4.8e12, 989e12, 67e12, "NVIDIA H200 Tensor Core GPU Datasheet (SXM), https://www.nvidia.com/h200"
    ),
    # SXM4, 80 GB HBM2e: 2,039 GB/s; 312 TFLOP/s bfloat16 dense, 19.5 in float32.
    "a100": _gpu(
        "a100",
        2.039e12,
        312e12,
        19.5e12,
        "NVIDIA A100 Tensor Core GPU Datasheet (80GB SXM), https://www.nvidia.com/a100",
    ),
}
