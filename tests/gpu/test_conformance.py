"""The CUDA device through the conformance battery, on the first GPU and on the second."""

from __future__ import annotations

import cupy
import pytest

from kvcore.device.cuda import CudaDevice
from tests.device.battery import Battery
from tests.gpu.tools import device_count


class TestCuda(Battery):
    @pytest.fixture
    def device(self):
        device = CudaDevice(0)
        yield device
        device.close()


class TestSecondGpu(Battery):
    """Everything works on one GPU while another one is current."""

    @pytest.fixture
    def device(self):
        if device_count() < 2:
            pytest.skip("needs a second GPU")
        before = cupy.cuda.runtime.getDevice()
        device = CudaDevice(1)
        assert before == 0
        yield device
        device.close()
        assert cupy.cuda.runtime.getDevice() == before
