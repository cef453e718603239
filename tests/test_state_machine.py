"""All public calls in random orders, against the model and the oracle, with shrinking."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvcore.device.host import HostDevice
from kvcore.manager import KVCacheManager
from kvcore.testing import Lockstep
from kvcore.testing.small import draw_config, small_config
from kvcore.testing.walk import Walk
from tests import stress


class HypothesisDraw:
    """Choices that hypothesis makes, records and shrinks."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def number(self, low, high):
        return self.data.draw(st.integers(low, max(low, high)))

    def pick(self, options):
        return self.data.draw(st.sampled_from(list(options)))


class Immediate(RuleBasedStateMachine):
    """One walk; each action of `Walk` is a rule."""

    deferred = False

    def __init__(self):
        super().__init__()
        self.walk = None

    @initialize(data=st.data(), seed=st.integers(0, 1000))
    def begin(self, data, seed):
        draw = HypothesisDraw(data)
        self.walk = Walk(draw_config(draw), HostDevice(deferred=self.deferred, seed=seed), draw)

    @rule(data=st.data())
    def step(self, data):
        walk, self.walk = self.walk, None  # what failed is not taken down as if it had not
        walk.draw = HypothesisDraw(data)
        walk.step()
        self.walk = walk

    def teardown(self):
        if self.walk is not None:
            self.walk.finish()


class Deferred(Immediate):
    """The same on simulated streams that run in any order the events allow."""

    deferred = True


TestImmediate = Immediate.TestCase
TestDeferred = Deferred.TestCase
TestImmediate.settings = settings(max_examples=35, stateful_step_count=35)
TestDeferred.settings = settings(max_examples=35, stateful_step_count=35)


@pytest.mark.parametrize("deferred", [False, True])
def test_ten_thousand_random_steps_of_fixed_seeds(deferred):
    """The bar: half of the steps on simulated streams, no violation, nothing left in the end."""
    actions = stress.run(5_000, seed=1_000 * deferred, deferred=deferred)
    assert actions.total() == 5_000
    assert min(actions.values()) > 20  # every kind of call was made


def test_a_walk_without_memory():
    """The control plane alone: what `meta` decides is what `host` decides."""
    pair = Lockstep(KVCacheManager(small_config(slots=10, max_beam_width=3), device="meta"))
    a, b = pair.create([4, None])
    assert pair.resume(a)
    assert pair.resume(b)
    assert pair.resize(a, 10, 9)
    assert pair.set_beam_width(a, 3)
    assert pair.advance([a, b], 4)
    pair.reorder_beams(a, [2, 0, 0])
    assert pair.set_beam_width(a, 2, [2, 2])
    assert pair.resize(b, 40) is False
    pair.truncate([a], [9])
    pair.close_all([a, b])
    pair.manager.shutdown()
