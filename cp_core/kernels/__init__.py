"""Attention kernels: how one block is computed. A kernel knows no ranks; strategies know no kernel."""

from .base import KERNELS, Block, BlockMerger, Kernel, KernelRequest, attend_block, register_kernel
from .sdpa import SdpaKernel

register_kernel("sdpa", SdpaKernel)

__all__ = [
    "KERNELS",
    "Block",
    "BlockMerger",
    "Kernel",
    "KernelRequest",
    "SdpaKernel",
    "attend_block",
    "register_kernel",
]
