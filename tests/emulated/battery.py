"""The conformance battery. Run by `tests/test_cuda_emulated.py`."""

from __future__ import annotations

import pytest

from kvcore.device.cuda import CudaDevice
from tests.device.battery import Battery
from tests.device.battery_memory import MemoryTests
from tests.emulated import driver


class TestSecondDevice(Battery):
    """Every line of Python between the contract and the driver, with the kernels' own text.

    On a device that is never the current one; what was current stays.
    """

    @pytest.fixture
    def device(self):
        driver.make_current(0)
        device = CudaDevice(1)
        yield device
        device.close()
        assert driver.current() == 0
        driver.make_current(None)


class TestWithoutVirtualMemory(MemoryTests):
    """The memory part where pools are plain allocations."""

    @pytest.fixture
    def device(self):
        driver.switch("no_virtual_memory", True)
        device = CudaDevice(0)
        yield device
        device.close()
