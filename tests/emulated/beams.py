"""The beam steps of the GPU's tests, without a GPU."""

from __future__ import annotations

import pytest

from tests.emulated import driver
from tests.gpu import tools
from tests.gpu.test_beams import *  # noqa: F403
from tests.gpu.test_dense import *  # noqa: F403
from tests.gpu.test_paths import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("held")
test_nothing_waits_for_the_device = None  # needs streams that run beside the host
test_five_thousand_beams = None  # takes long


class Graph:
    """Does the work anew in each launch, as if it were captured."""

    def __init__(self, device, work, on):
        self._work, self._stream = work, on

    def launch(self):
        driver.switch("capturing", True)
        self._work(self._stream)
        driver.switch("capturing", False)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    monkeypatch.setattr(tools, "Graph", Graph)
    monkeypatch.setattr(tools, "capturable", lambda device: device.create_stream())
