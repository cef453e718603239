"""The fixtures of the battery: a device comes from the inheriting class, the rest is made of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcore.device.base import Device
from tests.device.harness import Rig


class BatteryBase:
    """Base of the battery's parts."""

    @pytest.fixture
    def device(self) -> Device:
        """The device under test."""
        raise NotImplementedError("the inheriting class gives the device")

    @pytest.fixture
    def rig(self, device: Device) -> Iterator[Rig]:
        """The device with a stream of its own; its memory is closed after the test."""
        rig = Rig(device, device.create_stream())
        yield rig
        rig.close()
