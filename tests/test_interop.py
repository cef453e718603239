"""Arrays of frameworks on the host device: taken and given without a copy, exactly."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

import kvcore as k
from kvcore.dlpack.exports import exports
from kvcore.lease_book import MOST_PARTS, LeaseEntry
from tests.helpers import opened, row, typed_manager

H, D = 2, 8


@pytest.fixture
def step():
    m = typed_manager(layers=2)
    (kv,) = opened(m, 6)
    step = m.create_batch(2, 8)
    step.prepare([kv], 6)
    return m, kv, step


def numbers() -> np.ndarray:
    return np.arange(2 * 6 * H * D, dtype=np.float32).reshape(2, 6, H, D)


def test_torch_tensors_go_in_and_out(step):
    torch = pytest.importorskip("torch")
    _, kv, step = step
    keys = torch.from_numpy(numbers())
    step.append([0, 1], {"key": keys, "value": keys.flip(1)})
    out = torch.empty(6, H, D), torch.empty(6, H, D)
    got = step.gather(1, out=out)
    assert got == out
    assert torch.equal(out[0], keys[1])
    assert torch.equal(out[1], keys[1].flip(0))
    table = step.page_table(0)
    taken = torch.from_dlpack(table)
    assert (taken.data_ptr(), taken.tolist()) == (table.ctypes.data, [row(kv)])


def test_torch_types_that_numpy_lacks_go_by_their_bits():
    torch = pytest.importorskip("torch")
    m = typed_manager(layers=1, dtype="bfloat16")
    (kv,) = opened(m, 6)
    step = m.create_batch(1, 8)
    step.prepare([kv], 6)
    keys = torch.randn(6, H, D).to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"expected bfloat16, as declared.*got float8_e5m2"):
        step.append(0, {"key": keys.to(torch.float8_e5m2)})
    step.append(0, {"key": keys, "value": keys.view(torch.uint16)})
    for bits in step.gather(0):
        assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), keys)
    out = torch.empty_like(keys)
    step.gather(0, ["key"], out=[out])
    assert torch.equal(out, keys)


def test_jax_arrays_go_in_and_out(step):
    jax = pytest.importorskip("jax")
    _, _, step = step
    keys = jax.numpy.asarray(numbers())
    step.append([0, 1], {"key": keys, "value": keys[:, ::-1]})
    got, flipped = step.gather(0)
    np.testing.assert_array_equal(jax.numpy.from_dlpack(got), keys[0])
    np.testing.assert_array_equal(jax.numpy.from_dlpack(flipped), keys[0, ::-1])


@pytest.mark.parametrize(("take", "by"), [(np.from_dlpack, "use"), (np.asarray, "use_while")])
@pytest.mark.parametrize("counted", [False, True])
def test_a_lease_that_is_closed_while_it_is_taken(take, by, counted, monkeypatch):
    """Another thread closes it right before the array is counted, or right after."""
    m = typed_manager()
    lease = m.lease(0, "key")
    count = getattr(LeaseEntry, by)

    def count_and_close(entry, *user):
        monkeypatch.setattr(LeaseEntry, by, count)
        release = count(entry, *user) if counted else None
        with suppress(k.LeaseInUse):
            lease.close()
            m.shutdown()
        return release if counted else count(entry, *user)

    monkeypatch.setattr(LeaseEntry, by, count_and_close)
    memory, held = m._runtime.pools[0][0], None
    with suppress(k.StateError):
        held = take(lease)
    assert not lease.is_open
    assert counted == (held is not None)
    assert lease.num_arrays == counted
    assert memory.closed != counted


@pytest.mark.parametrize("stream", [-1, 0, 1, "a"])
def test_a_lease_of_memory_of_the_host_takes_no_stream(stream):
    m = typed_manager()
    lease = m.lease(0, "key")
    with pytest.raises((TypeError, ValueError), match="stream: expected None"):
        lease.__dlpack__(stream=stream)
    assert lease.num_arrays == 0
    lease.close()
    m.shutdown()


def test_nothing_is_leased_after_shutdown():
    m = typed_manager()
    m.shutdown()
    for call in (lambda: m.lease(0, "key"), m.lease_page_table):
        with pytest.raises(k.StateError, match="shut down"):
            call()


def test_what_was_leased_before_is_known_within_bounds():
    m = typed_manager(slots=64)
    first = m.lease(0, "key")
    assert m.lease(0, "key")._patterns is first._patterns
    assert m.lease(0, "value")._patterns is not first._patterns
    for run in range(2):
        for start in range(1, 62):
            for stop in range(start, start + 20):
                m.lease(0, "key", pages=range(start, min(stop, 62))).close()
        assert len(m._runtime.leases._parts) <= MOST_PARTS, run
    first.close()
    m.shutdown()


@pytest.mark.parametrize("call", ["__dlpack__", "old_capsule"])
def test_a_capsule_that_cannot_be_made_is_no_use(call, monkeypatch):
    def planted(*_):
        raise MemoryError("planted")

    m = typed_manager()
    lease = m.lease(0, "key")
    with monkeypatch.context() as patch:
        patch.setattr(exports(), "_pointer", planted)
        with pytest.raises(MemoryError, match="planted"):
            getattr(lease, call)()
    assert lease.num_arrays == 0
    lease.close()
    m.shutdown()
