"""One step on the device: mapping, append, gather, page tables. Exact, on the host device."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import kvcore as k
from kvcore.device.host import HostDevice
from tests.helpers import opaque_manager, opened, row, typed_manager

H, D = 2, 8


def tokens(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal((*shape, H, D), dtype=np.float32)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("deferred", [False, True])
def test_what_was_appended_is_gathered(layout, deferred):
    device = HostDevice(deferred=deferred, seed=3)
    m = typed_manager(layers=3, layout=layout, device=device)
    rng = np.random.default_rng(0)
    caches = opened(m, 6, 1, 9)
    b = m.create_batch(8, 32)
    b.prepare(caches, [6, 1, 9])
    new = {role: tokens(rng, 3, 16) for role in ("key", "value")}
    b.append([0, 2], {role: new[role][[0, 2]] for role in new})
    b.append(1, {"value": new["value"][1], "key": new["key"][1]})
    whole = m.create_batch(8, 32)
    whole.prepare(caches[::-1], [9, 1, 6], start=0)
    order = [*range(7, 16), 6, *range(6)]
    stream = device.default_stream
    for layer in range(3):
        for role, array in zip(("key", "value"), whole.gather(layer), strict=True):
            got = device.to_host(array, stream=stream)
            np.testing.assert_array_equal(got, new[role][layer][order])
    (stacked,) = whole.gather([2, 0], ("value",))
    got = device.to_host(stacked, stream=stream)
    np.testing.assert_array_equal(got, new["value"][[2, 0]][:, order])


def test_the_device_mapping_equals_the_hosts():
    m = typed_manager(slots=32, max_beam_width=3, enable_partial_commit=False)
    a, b = opened(m, 7, 5)
    b.resize(None, 5)
    b.set_beam_width(3)
    assert m.advance([a, b], 2)
    step = m.create_batch(4, 16)
    step.prepare([a, b], [3, 2], start=[2, 5])
    slots, offsets = m.slot_mapping([a, b], [3, 2], start=[2, 5])
    assert (step.num_rows, step.num_tokens) == (4, 9)
    assert step.mapping[0, :9].tolist() == np.stack([slots, offsets], axis=1).tolist()
    assert step.mapping[0, 9:].tolist() == [[-1, 0]] * 7  # padding
    assert step.page_table(0).tolist() == [[*row(a)], *([*row(b, i), -1] for i in range(3))]
    step.prepare([a], 1, start=0)  # a smaller step leaves no trace of the larger one
    assert step.rows.tolist()[1:] == [-1] * 3
    assert step.mapping[0].tolist() == [[row(a)[0], 0]] + [[-1, 0]] * 15


def test_the_table_on_the_device_follows_the_host():
    m = typed_manager(slots=32, max_beam_width=3, enable_partial_commit=False)
    caches = opened(m, 7, 5, 9)
    step = m.create_batch(8, 8)

    def twin_is_current():
        alive = [kv for kv in caches if kv.is_active]
        step.prepare(alive, 0)
        host = m._runtime.control.seqs
        used = host.used_rows
        np.testing.assert_array_equal(m.page_table(0)[:used], host.table[:used, 0])

    twin_is_current()
    caches[0].resize(20, 7)
    caches[0].set_beam_width(3)
    twin_is_current()
    caches[0].reorder_beams([2, 0, 0])
    caches[1].suspend()
    twin_is_current()
    caches[0].set_beam_width(1)
    caches[1].resume()
    caches[2].close()
    twin_is_current()
    caches += opened(m, 30)
    m.truncate([caches[0]], [7])
    twin_is_current()


def test_addresses_never_change():
    """A captured graph holds addresses: they outlive growth, closing and new sequences."""
    m = typed_manager(slots=64, max_sequences=600)
    step = m.create_batch(4, 8)

    def addresses():
        table = m.page_table(0)
        arrays = (table, step.rows, step.mapping)
        return [m.get_mem_pool_base_address(0, "key"), *(a.ctypes.data for a in arrays)]

    before = addresses()
    for _ in range(3):
        caches = m.create_kv_caches([None] * 500)
        for kv in caches[:16]:
            kv.resume()
            kv.resize(16)
        step.prepare(caches[:4], 1)
        m.close_kv_caches(caches)
    assert addresses() == before


def test_padding_writes_nothing():
    m = typed_manager(layers=1)
    a, b = opened(m, 4, 4)
    step = m.create_batch(4, 4)
    ones = np.ones((4, H, D), np.float32)
    step.prepare([a, b], 2, start=0)
    step.append(0, {"key": ones, "value": ones})
    step.prepare([b], 1, start=2)
    step.append(0, {"key": 7 * ones, "value": 7 * ones})  # as in a graph: arrays of max_tokens
    with pytest.raises(ValueError, match="max_tokens=4"):
        m.create_batch(4, 4).prepare([a, b], [4, 4], start=0)
    big = m.create_batch(4, 8)
    big.prepare([a, b], [2, 3], start=0)
    keys, _ = big.gather(0)
    assert keys[:, 0, 0].tolist() == [1, 1, 1, 1, 7]


def test_strided_operands_and_latent_pages():
    """Any strides, and a buffer with one head whose arrays leave the head axis out."""
    layer = k.AttentionLayerConfig(
        layer_id=0,
        kind="mla",
        buffers=[k.BufferConfig(role="latent", size=4 * 6 * 2, dtype="bfloat16", shape=(6,))],
    )
    m = k.KVCacheManager(
        k.KVCacheManagerConfig(
            tokens_per_block=4, cache_tiers=[k.GpuCacheTierConfig(quota=4096)], layers=[layer]
        ),
        device="host",
    )
    (kv,) = opened(m, 5)
    step = m.create_batch(1, 8)
    step.prepare([kv], 5)
    values = np.arange(60, dtype=np.uint16).reshape(6, 10)[:, ::2].T
    step.append(0, {"latent": values})
    (got,) = step.gather(0, ("latent",))
    assert got.dtype == np.uint16
    np.testing.assert_array_equal(got[:, 0], values)


def test_a_layer_comes_once_and_messages_stay_short():
    m = typed_manager(layers=2)
    step = m.create_batch(1, 4)
    step.prepare(opened(m, 4), 4)
    new = np.zeros((2, 4, H, D), np.float32)
    with pytest.raises(ValueError, match="layers, roles: expected each of them once"):
        step.append([1, 1], {"key": new, "value": new})
    with pytest.raises(ValueError, match="layers, roles: expected each of them once"):
        step.gather(0, ("key", "key"))
    with pytest.raises(TypeError, match=r"\.\.\.") as told:
        step.append(0, {"key": [[0.0] * 1000], "value": new[0]})
    assert len(str(told.value)) < 700


def test_wrong_operands_are_refused():
    m = typed_manager()
    (kv,) = opened(m, 4)
    step = m.create_batch(2, 8)
    good = np.zeros((3, H, D), np.float32)
    with pytest.raises(k.StateError, match="prepare"):
        step.append(0, {"key": good})
    step.prepare([kv], 3)
    with pytest.raises(ValueError, match=r"key.*\[3, 2, 8\]"):
        step.append(0, {"key": good[:2]})
    with pytest.raises(ValueError, match=r"key.*\[2, 3, 2, 8\]"):
        step.append([0, 1], {"key": good})
    with pytest.raises(TypeError, match="4 bytes"):
        step.append(0, {"key": good.astype(np.float64)})
    with pytest.raises(TypeError):
        step.append(0, {"key": "text"})
    with pytest.raises(ValueError, match="role"):
        step.append(0, {"kez": good})
    with pytest.raises(ValueError, match="layer"):
        step.append(7, {"key": good})
    with pytest.raises(ValueError, match="at least one"):
        step.append([], {"key": good})
    with pytest.raises(ValueError, match="capacity"):
        step.prepare([kv], 5)
    with pytest.raises(ValueError, match="out"):
        step.gather(0, out=[good])
    with pytest.raises(ValueError, match=r"out: 'key': expected elements with a place each"):
        step.gather(0, ["key"], out=[as_strided(good.copy(), good.shape, (0, 32, 4))])
    opaque = opaque_manager()
    batch = opaque.create_batch(1, 1)
    batch.prepare(opened(opaque, 1), 1)
    with pytest.raises(ValueError, match="declare dtype and shape"):
        batch.gather(0)


def run_on_another_stream(seed: int, *, forget: str | None = None) -> bool:
    """Whether all is right if a lent stream reads, the page is freed and a third takes it.

    `forget` leaves one wait out: of the lent stream for the owner, of the owner for the lent
    stream, or of the new owner for the ticket.
    """
    device = HostDevice(deferred=True, seed=seed)
    m = typed_manager(slots=1, layers=1, dim=256, device=device)  # one slot
    runtime = m._runtime
    owner, lent, third = (device.create_stream() for _ in range(3))
    kv = m.create_kv_cache()
    assert kv.resume(owner)
    assert kv.resize(4)
    first = np.ones((4, H, 256), np.float32)
    step, on_lent = m.create_batch(1, 4), m.create_batch(1, 4)
    step.prepare([kv], 4)
    step.append(0, {"key": first, "value": first})
    if forget == "lend":
        runtime.streams.lend = lambda sequences, stream: None
    on_lent.prepare([kv], 4, stream=lent)
    keys, _ = on_lent.gather(0)
    if forget == "come home":
        runtime.streams.come_home = lambda sequence: None
    kv.close()
    if forget == "ticket":
        runtime.streams.wait = lambda sequences, tickets: None
    other = m.create_kv_cache()
    assert other.resume(third)
    assert other.resize(4)
    device.fill_pages(runtime.pool_places[0], other.get_base_page_indices(0), 0xFF, stream=third)
    device.drain()
    return bool((keys == 1).all())


def test_pages_lent_to_another_stream_are_safe_in_every_order():
    assert all(run_on_another_stream(seed) for seed in range(60))


@pytest.mark.parametrize("forget", ["lend", "come home", "ticket"])
def test_each_wait_is_needed(forget):
    assert not all(run_on_another_stream(seed, forget=forget) for seed in range(60))


def test_changes_nobody_sends_do_not_pile_up():
    """An engine may keep tables of its own and never prepare a batch."""
    device = HostDevice(deferred=True, seed=1)
    m = typed_manager(slots=64, device=device)
    streams = [device.create_stream() for _ in range(2)]
    for i in range(3_000):
        with m.create_kv_cache() as kv:
            kv.resume(streams[i % 2])
            kv.resize(9)
    seqs = m._runtime.control.seqs
    assert len(seqs.dirty) <= 1_100
    assert sum(entry.cells.size for entry in seqs.dirty) < 5_000
    (kv,) = opened(m, 9)
    step = m.create_batch(1, 9)
    step.prepare([kv], 9)
    assert device.to_host(step.page_table(0), stream=kv.stream).tolist() == [row(kv)]
    assert not seqs.dirty


def layerwise(*values: float) -> np.ndarray:
    return np.array(values, np.float32).reshape(-1, 1, 1, 1)


def test_an_append_that_looks_like_the_last_one_is_checked_all_the_same():
    m = typed_manager(layers=2, slots=32)
    (kv,) = opened(m, 12)
    step = m.create_batch(2, 8)
    step.prepare([kv], 4)
    good = np.ones((2, 4, H, D), np.float32)
    layers = [0, 1]
    step.append(layers, {"key": good, "value": 2 * good})
    step.append(layers, {"value": 4 * good, "key": 3 * good})  # roles in another order
    step.append((1, 0), {"key": good * layerwise(5, 6), "value": good})  # other layers
    keys, values = step.gather([0, 1])
    assert (keys[:, 0, 0, 0].tolist(), values[:, 0, 0, 0].tolist()) == ([6, 5], [1, 1])
    for wrong, error in (
        ({"key": good[:, :3], "value": good[:, :3]}, ValueError),
        ({"key": good, "value": good.astype(np.float64)}, TypeError),
        ({"key": good.tolist(), "value": good}, TypeError),
        ({"key": good, "value": good.astype(">f4")}, TypeError),
        ({"key": good}, None),
    ):
        if error is None:
            step.append([0, 1], wrong)
        else:
            with pytest.raises(error):
                step.append([0, 1], wrong)
    with pytest.raises(TypeError):
        step.append(np.array([0, 1]), {"key": good, "value": good})
    layers.reverse()  # the caller's own list
    step.append(layers, {"key": good * layerwise(7, 8), "value": good})
    assert step.gather([0, 1])[0][:, 0, 0, 0].tolist() == [8, 7]
    step.prepare([kv], 3, start=4)
    with pytest.raises(ValueError, match="key"):
        step.append([0, 1], {"key": good, "value": good})
