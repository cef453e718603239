"""The conformance battery: what every device must do, whatever it is made of.

A test module runs it by inheriting and giving a device::

    class TestHost(Battery):
        @pytest.fixture
        def device(self):
            device = HostDevice()
            yield device
            device.close()

Everything is compared exactly. Data moves through `to_host` and `from_host` only, so the same tests
run on arrays of any device.
"""

from __future__ import annotations

from tests.device.battery_beams import RowTests
from tests.device.battery_dense import DenseTests
from tests.device.battery_formats import FormatTests
from tests.device.battery_memory import MemoryTests
from tests.device.battery_pages import PageTests
from tests.device.battery_paths import PathTests
from tests.device.battery_stacks import StackTests
from tests.device.battery_tables import TableTests
from tests.device.battery_tails import TailTests


class Battery(
    MemoryTests,
    TableTests,
    StackTests,
    PageTests,
    RowTests,
    TailTests,
    DenseTests,
    PathTests,
    FormatTests,
):
    """All of it."""
