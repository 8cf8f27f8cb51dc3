"""Which device work goes to: one rule for every command and every function that takes a device."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def usable_device(name: torch.device | str | None = None) -> torch.device:
    """Return the device `name`, if torch can use it here; None: a CUDA device if there is one, else the CPU.

    Of several processes of `torchrun`, each takes its own CUDA device by `LOCAL_RANK`.

    Raises:
        ValueError: no torch device, one that holds no numbers ("meta"), or one that torch does not see here.
    """
    if name is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name} is not a torch device, such as cpu or cuda") from error
    if device.type == "cpu":
        return device
    if device.type == "meta":
        raise ValueError("device meta holds shapes without numbers: nothing can be computed there")
    here = torch.accelerator.current_accelerator(check_available=True)
    such = "such " if here is not None and here.type == device.type else ""
    if not (such and (device.index or 0) < torch.accelerator.device_count()):
        raise ValueError(f"device {name}: torch sees no {such}{device.type.upper()} device here")
    return device


def quarter_of_memory(device: torch.device | str = "cpu") -> int:
    """Return, in bytes, a fourth of this machine's memory, or of what is free on a GPU now."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def processor() -> str:
    """Return what the processor is called."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def features() -> list[str]:
    """Vector and matrix instructions of `FEATURES` that the processor has, as Linux names them; none elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return [name for name in FEATURES if name in flags]
