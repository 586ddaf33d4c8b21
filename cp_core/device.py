"""The one place that asks which device this process uses. Nothing else names cuda or npu."""

from __future__ import annotations

import importlib.util
import os

import torch

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


def device_type() -> str:
    """``cpu``, ``cuda``, ``npu``, ...: the accelerator that torch sees, else the CPU."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator is not None else "cpu"
    return "cpu"


def local_device() -> torch.device:
    """This process's device: number LOCAL_RANK of the accelerator, or the CPU."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def device_count() -> int:
    """Number of accelerators on this machine; 0 without one."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def backend_for(kind: str) -> str:
    """The c10d backend of a device type.

    Raises:
        ValueError: no backend is known for it.
    """
    if kind not in _BACKENDS:
        raise ValueError(f"no collective backend is known for device type {kind!r}; known: {', '.join(_BACKENDS)}")
    return _BACKENDS[kind]


def peak_memory_bytes() -> int | None:
    """Peak bytes that the accelerator's allocator held; on the CPU the peak resident set of this process."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    if importlib.util.find_spec("resource") is None:
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
