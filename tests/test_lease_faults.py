"""Leased pages on a driver that fails once, at every point: the call that was hit is made again.

It has changed nothing, so the second one must be enough: every scene of `tests.lease_scenes` stays
right in every order that events allow.
"""

from __future__ import annotations

from functools import wraps

import pytest

import kvcore as k
from kvcore.batch import Batch
from kvcore.device.simulated import DeferredEvent, DeferredStream
from kvcore.errors import DriverError
from kvcore.kv_cache import KVCache
from kvcore.lease_book import LeaseBook
from kvcore.leases import Lease
from tests.lease_scenes import SCENES

CALLS = {
    k.KVCacheManager: ("lease", "lease_page_table", "get_storage_statistics"),
    Lease: ("acquire", "release", "close"),
    Batch: ("prepare", "append", "gather"),
    KVCache: ("resume", "resize", "suspend", "close"),
    LeaseBook: ("hand_over",),
}
DRIVER = {DeferredStream: ("record", "wait", "is_idle"), DeferredEvent: ("done",)}
MOST, SEEDS = 40, range(4)


class Fault:
    """Lets one call of the driver fail inside of calls, which are then made again."""

    def __init__(self, monkeypatch) -> None:
        self.left, self.depth, self.struck = 0, 0, False
        for wrap, parts in ((self.failing, DRIVER), (self.again, CALLS)):
            for cls, names in parts.items():
                for name in names:
                    monkeypatch.setattr(cls, name, wrap(getattr(cls, name)))

    def plan(self, left: int) -> None:
        self.left, self.struck = left, False

    def failing(self, real):
        @wraps(real)
        def call(*args, **more):
            if self.depth and not self.struck:
                self.left -= 1
                if self.left < 0:
                    self.struck = True
                    raise DriverError(real.__name__, 1, "planted")
            return real(*args, **more)

        return call

    def again(self, real):
        @wraps(real)
        def call(*args, **more):
            self.depth += 1
            try:
                return real(*args, **more)
            except DriverError:
                if self.depth > 1:
                    raise
                return real(*args, **more)
            finally:
                self.depth -= 1

        return call


@pytest.mark.parametrize("scene", SCENES)
def test_a_call_that_failed_is_made_again(scene, monkeypatch):
    fault, wrong, struck = Fault(monkeypatch), [], 0
    for left in range(MOST):
        for seed in SEEDS:
            fault.plan(left)
            if not scene(seed):
                wrong.append((left, seed))
            struck += fault.struck
        if not fault.struck:
            break
    assert not wrong
    assert struck > len(SEEDS)
