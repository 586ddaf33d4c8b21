"""Attention kernels: how one block is computed. A kernel knows no ranks; strategies know no kernel."""

from .base import KERNELS, Block, Kernel, KernelRequest, attend_block, merge, register_kernel
from .flash import FlashKernel
from .npu_flash import NpuFlashKernel
from .sdpa import SdpaKernel


def _flex() -> Kernel:
    from .flex import FlexKernel  # late: it imports torch's FlexAttention

    return FlexKernel()


register_kernel("sdpa", SdpaKernel)
register_kernel("flex", _flex)
register_kernel("flash", FlashKernel)
register_kernel("npu_flash", NpuFlashKernel)

__all__ = [
    "KERNELS",
    "Block",
    "Kernel",
    "KernelRequest",
    "SdpaKernel",
    "attend_block",
    "merge",
    "register_kernel",
]
