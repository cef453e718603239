"""Devices move bytes. `open_device` finds one by name; `kvcore.device.base` is their contract."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvcore.errors import wrong, wrong_type

if TYPE_CHECKING:
    from kvcore.device.base import Device

__all__ = ["open_device"]

ALLOWED = '"auto", "host", "meta", "cuda", "cuda:N" or a Device'


def open_device(spec: str | Device = "auto") -> Device:
    """The device that `spec` names.

    Parameters
    ----------
    spec : str or Device, default "auto"
        "cuda" is the current GPU, "cuda:1" the second one; "host" keeps pages in host memory;
        "meta" has pages without memory, for sizing and replay; "auto" is "cuda" if CuPy is
        installed and finds a GPU, else "host". A `Device` is returned as it is.

    Returns
    -------
    Device
        A new device, or the one that came. The caller closes what it opened.

    Raises
    ------
    ValueError
        If there is no such device.
    TypeError
        If `spec` is neither a str nor a `Device`.
    ImportError
        If a GPU is asked for and CuPy or cuda-python is missing.

    Examples
    --------
    >>> open_device("host").kind
    'host'
    """
    from kvcore.device.base import Device

    if isinstance(spec, Device):
        return spec
    if not isinstance(spec, str):
        raise wrong_type("device", ALLOWED, spec)
    name, colon, index = spec.partition(":")
    if name == "cuda" and (not colon or (index.isascii() and index.isdecimal())):
        return _open_cuda(int(index) if colon else None)
    if spec in ("host", "meta") or (spec == "auto" and not _finds_gpu()):
        from kvcore.device.host import HostDevice, MetaDevice

        return MetaDevice() if spec == "meta" else HostDevice()
    if spec == "auto":
        return _open_cuda(None)
    raise wrong("device", ALLOWED, spec)


def _finds_gpu() -> bool:
    """Whether CuPy is installed and sees at least one GPU."""
    if find_spec("cupy") is None or find_spec("cuda") is None:
        return False
    try:
        from kvcore.device.cuda import device_count
    except ImportError as error:
        if _is_ours(error):
            raise
        return False  # installed for another CUDA version, or its libraries are missing
    return device_count() > 0


def _is_ours(error: ImportError) -> bool:
    """Whether a module of kvcore itself is missing: a broken installation, not an absent CuPy."""
    return (error.name or "").partition(".")[0] == "kvcore"


def _open_cuda(index: int | None) -> Device:
    try:
        from kvcore.device.cuda import CudaDevice, device_count
    except ImportError as error:
        if _is_ours(error):
            raise
        text = f'device="cuda" needs CuPy and cuda-python: pip install "kvcore[cuda12]" ({error})'
        raise ImportError(text, name=error.name) from error
    count = device_count()
    if (index or 0) >= count:
        asked = "cuda" if index is None else f"cuda:{index}"
        there = f"the driver shows {count} of them" if count else "there is none, or no driver"
        raise wrong("device", "a GPU that is there", asked, f'{there}; use "host" or "auto"')
    return CudaDevice(index)
