"""The driver API: one check for its results, and contexts made current only where they must be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from cuda.bindings import driver

from kvcore.errors import DriverError, OutOfMemoryError, StateError, wrong

OUT_OF_MEMORY: Final = int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)


def check(call: str, result: tuple[Any, ...]) -> Any:
    """What a driver call returned, without its code.

    Parameters
    ----------
    call : str
        Name of the call, for the message.
    result : tuple
        What the call of `cuda.bindings.driver` returned: its code, then its values.

    Raises
    ------
    OutOfMemoryError
        The device has no memory left.
    DriverError
        Anything else but success.
    """
    if result[0]:
        raise failure(call, int(result[0]))
    return result[1] if len(result) == 2 else result[1:]


def failure(call: str, code: int) -> DriverError | OutOfMemoryError:
    """The exception for a code that is not success."""
    text = explain(code)
    if code == OUT_OF_MEMORY:
        return OutOfMemoryError(f"{call} failed with {code}: {text}")
    return DriverError(call, code, text)


def explain(code: int) -> str:
    """The driver's name and sentence for a code."""
    try:
        result = driver.CUresult(code)
    except ValueError:
        return "a code that cuda-python does not know"
    texts = (driver.cuGetErrorName(result), driver.cuGetErrorString(result))
    return ": ".join(text.decode() for error, text in texts if not error and text)


def device_count() -> int:
    """How many GPUs the driver shows to this process; 0 without a driver. Makes no context."""
    try:
        error = driver.cuInit(0)[0]
        return 0 if error else int(check("cuDeviceGetCount", driver.cuDeviceGetCount()))
    except (RuntimeError, OSError, ImportError):  # no libcuda, or one too old
        return 0


def current_device() -> int:
    """The device whose context is current in this thread, 0 if none is."""
    check("cuInit", driver.cuInit(0))
    error, device = driver.cuCtxGetDevice()
    return 0 if error else int(device)


class Context:
    """The primary context of one device.

    Retained once and for the life of the process, like the CUDA runtime does: streams, events and
    arrays of others live in it.
    """

    def __init__(self, device_id: int) -> None:
        check("cuInit", driver.cuInit(0))
        count = int(check("cuDeviceGetCount", driver.cuDeviceGetCount()))
        if not 0 <= device_id < count:
            raise wrong("device", f'"cuda:0" to "cuda:{count - 1}"', f"cuda:{device_id}")
        self.device_id = device_id
        self.device: Any = check("cuDeviceGet", driver.cuDeviceGet(device_id))
        # Compared with what is current on every launch; replaced in a forked child, where nothing
        # can be current.
        self.handle: Any = check(
            "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(self.device)
        )
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._forked)

    def __repr__(self) -> str:
        return f"Context(cuda:{self.device_id})"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes this context current for a block; leaves what was current before, also none."""
        if os.getpid() != self._process:
            raise StateError(
                "CUDA does not survive fork(): open the device in the child process, or start that "
                'with multiprocessing\'s "spawn" method'
            )
        if driver.cuCtxGetCurrent()[1] == self.handle:
            yield
            return
        check("cuCtxPushCurrent", driver.cuCtxPushCurrent(self.handle))
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()

    def call(self, name: str, *args: Any) -> Any:
        """What the driver call `name` returns in this context, checked."""
        function = getattr(driver, name)
        if driver.cuCtxGetCurrent()[1] == self.handle:
            return check(name, function(*args))
        with self.current():
            return check(name, function(*args))

    def attribute(self, name: str) -> int:
        """A device attribute by its driver name, without the prefix."""
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(
            check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, self.device))
        )

    def synchronize(self) -> None:
        """Blocks until the device is idle."""
        self.call("cuCtxSynchronize")

    def free_bytes(self) -> int:
        """Device memory that nobody has, in bytes."""
        return int(self.call("cuMemGetInfo")[0])

    def _forked(self) -> None:
        self.handle = object()


@cache
def context_of(device_id: int) -> Context:
    """The one `Context` of a device."""
    return Context(device_id)
