"""A GPU by its data sheet: a file of seven fields, which ships for a few GPUs and which a user writes for another one.

The published ones lie in `sparseattn/data/gpus`; docs/lab/machine.md says what the fields mean.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseattn.utils.json_fields import FieldError, Number, Object, Text
from sparseattn.utils.json_text import parse_object
from sparseattn.utils.suggest import did_you_mean

CPU = "cpu"  # no GPU: the machine that was measured here
# Seconds of a launch in a CUDA graph that does next to nothing: "Getting Started with CUDA Graphs", NVIDIA 2019,
# https://developer.nvidia.com/blog/cuda-graphs/, 3.4 us for a kernel that runs for 2.9, on a V100.
GPU_LAUNCH = 3.4e-6
_POSITIVE = Number(1e-6, 1e9)
FIELDS = Object(
    {
        "name": Text(empty=False),
        "memory_gb": _POSITIVE,
        "bandwidth_gb_s": _POSITIVE,
        "tensor_tflops": _POSITIVE,
        "vector_tflops": _POSITIVE,
        "source": Text(empty=False),
    },
    {"launch_us": Number(0, 1e9)},
)


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What a data sheet says of one GPU.

    Args:
        name: by which the command knows it.
        memory: bytes, with the data sheet's gigabyte taken as 10^9.
        bandwidth: bytes per second of that memory.
        tensor: operations per second of 16-bit tensor cores, summed in float32, without sparsity.
        vector: operations per second in float32 outside the tensor cores.
        launch: seconds of a kernel in a CUDA graph that does next to nothing.
        source: the document.
    """

    name: str
    memory: float
    bandwidth: float
    tensor: float
    vector: float
    launch: float
    source: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> DataSheet:
        """Return the sheet of a JSON object; FieldError for a field that is missing, unknown or not what it must be."""
        known = (*FIELDS.fields, *FIELDS.more)
        for name in record:
            if name not in known:
                raise FieldError(f"a data sheet has {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
        FIELDS.check(record)
        return cls(
            record["name"],
            record["memory_gb"] * 1e9,
            record["bandwidth_gb_s"] * 1e9,
            record["tensor_tflops"] * 1e12,
            record["vector_tflops"] * 1e12,
            record["launch_us"] * 1e-6 if "launch_us" in record else GPU_LAUNCH,
            record["source"],
        )


def published() -> list[DataSheet]:
    """Return the sheets that ship, by name."""
    folder = Path(str(importlib.resources.files("sparseattn"))) / "data" / "gpus"
    return [DataSheet.of(parse_object(path.read_bytes())) for path in sorted(folder.glob("*.json"))]
