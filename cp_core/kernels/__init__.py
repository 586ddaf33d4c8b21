"""Attention kernels: how one block is computed. A kernel knows no ranks; strategies know no kernel."""

from .base import KERNELS, Kernel, attend_blocks, register_kernel
from .sdpa import SdpaKernel

register_kernel("sdpa", SdpaKernel)

__all__ = ["KERNELS", "Kernel", "SdpaKernel", "attend_blocks", "register_kernel"]
