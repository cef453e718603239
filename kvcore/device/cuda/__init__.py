"""The CUDA device: CuPy arrays, kernels of our own, cuda-python for memory and streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice
    from kvcore.device.cuda.driver import device_count

__all__ = ["CudaDevice", "device_count"]


def __getattr__(name: str) -> Any:
    """Imports CuPy and cuda-python when they are needed: the kernel sources can do without."""
    if name == "CudaDevice":
        from kvcore.device.cuda.device import CudaDevice

        return CudaDevice
    if name == "device_count":
        from kvcore.device.cuda.driver import device_count

        return device_count
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
