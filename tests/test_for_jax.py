"""Whole pools as JAX arrays: in place, written by kvcore between calls, read inside `jit`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import kvcore as k
from kvcore.device.host import HostDevice
from kvcore.dlpack.exporter import Exporter
from kvcore.dlpack.view import view_of
from kvcore.layer_config import DTYPE_BITS, array_type
from tests.helpers import opened, row, typed_manager
from tests.interop_matrix import dense_bits

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402 - needs jax
from kvcore_adapters import for_jax  # noqa: E402
from kvcore_adapters.for_jax import JaxPools, array  # noqa: E402

H, D, T = 2, 8, 4
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def on_the_host():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


WIDE = {name for name in DTYPE_BITS if name.endswith("64")}


def filled(m, value: int = 1, dtype: str = "float32"):
    """A sequence of seven tokens, and its keys as bits."""
    (kv,) = opened(m, 7)
    step = m.create_batch(1, 8)
    step.prepare([kv], 7)
    bits = array_type(dtype)
    dim = D * DTYPE_BITS[dtype] // 8 // bits.itemsize
    new = np.arange(2 * 7 * H * dim).reshape(2, 7, H, dim)
    new = (new * value % (2 if dtype == "bool" else 120)).astype(bits)
    step.append([0, 1], {"key": new, "value": new[:, ::-1]})
    return kv, new


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_a_pool_is_an_array_of_its_type_in_place(dtype):
    m = typed_manager(slots=64, layers=2, dtype=dtype)
    kv, new = filled(m, dtype=dtype)
    lease = m.lease(layer_group=0)
    if dtype in WIDE or dtype == "float4_e2m1fn":
        with pytest.raises(BufferError, match=r"jax_enable_x64|lease.bits\(\)"):
            array(lease)
        if dtype in WIDE:
            return
        lease = lease.bits()
    pool = array(lease)
    assert pool.unsafe_buffer_pointer() == m.pool_group_descs[0].pool_addresses[0]
    assert (str(pool.dtype), pool.shape) == (lease.dtype, lease.shape)
    indices = m.get_page_index_converter(1, "key")(row(kv), k.PageIndexMode.PER_LAYER)
    pages = np.asarray(pool[indices]).reshape(-1, H, pool.shape[-1])[:7]
    np.testing.assert_array_equal(pages.view(new.dtype), new[1])


def test_complex_numbers_are_shared_as_wide_as_jax_has_them():
    for dtype, taken in (("complex64", True), ("complex128", False)):
        its = Exporter(view_of(dense_bits(dtype, (3, 4))))
        if taken:
            np.testing.assert_array_equal(array(its), its.view.numpy())
        else:
            with pytest.raises(BufferError, match="JAX would convert complex128"):
                array(its)


def test_64_bit_types_are_there_when_jax_has_them():
    m = typed_manager(slots=64, layers=2, dtype="float64")
    kv, new = filled(m, dtype="float64")
    with jax.enable_x64(True):
        pool = array(m.lease(layer_group=0))
        assert pool.dtype == np.float64
        indices = m.get_page_index_converter(1, "key")(row(kv), k.PageIndexMode.PER_LAYER)
        np.testing.assert_array_equal(np.asarray(pool[indices]).reshape(-1, H, D)[:7], new[1])
        del pool


def test_what_jax_would_copy_is_refused():
    m = typed_manager(slots=64, layers=2)
    with pytest.raises(BufferError, match=r"JAX takes no gaps.*layer_group="):
        array(m.lease(0, "key"))
    one = typed_manager(slots=64, layers=1, heads=1, dim=3, T=1)
    odd = one.lease(0, "key", pages=range(1, 2))
    assert odd.address % 64
    with pytest.raises(BufferError, match="no multiple of 64"):
        array(odd)
    with pytest.raises(BufferError, match="read-only"):
        array(m.lease(layer_group=0, readonly=True))
    assert m.lease(0, "key").num_arrays == 0
    closed = m.lease(0, "key")  # has gaps as well, which is not the reason
    closed.close()
    with pytest.raises(k.StateError, match="is closed"):
        array(closed)


def test_jax_never_sees_what_it_would_copy(monkeypatch):
    """It would do so in its own time, and a whole pool; asking for the copy's address can hang."""
    wide = typed_manager(slots=64, layers=2, dtype="int64").lease(layer_group=0)
    odd = typed_manager(layers=1, heads=1, dim=3, T=1).lease(0, "key", pages=range(1, 2))
    came = []

    def from_dlpack(its):
        came.append(its.__dlpack__())

    monkeypatch.setattr(jax.numpy, "from_dlpack", from_dlpack)
    for lease in (wide, odd):
        with pytest.raises(BufferError, match=r"JAX would (convert int64|copy: 0x)") as kept:
            array(lease)
        assert not came
        assert lease.num_arrays == 0, kept
        lease.close()
        with pytest.raises(k.StateError, match="is closed"):
            array(lease)


@jax.jit
def read_tokens(pages, indices):
    (pool,) = pages
    return pool[indices].reshape(-1, H, D)


def test_each_read_sees_what_was_written_before():
    m = typed_manager(slots=64, layers=2)
    (kv,) = opened(m, 7)
    step = m.create_batch(1, 8)
    step.prepare([kv], 7)
    convert = m.get_page_index_converter(1, "key")
    with JaxPools(m) as pools:
        assert pools.keys == ((0, 0),)
        for value in range(4):
            new = np.full((2, 7, H, D), value, np.float32)
            step.append([0, 1], {"key": new, "value": -new})
            found = pools.read(read_tokens, convert(row(kv), k.PageIndexMode.PER_LAYER))
            np.testing.assert_array_equal(found[:7], new[1])
    kv.close()
    m.shutdown()


def test_reads_come_after_deferred_writes():
    for seed in range(20):
        device = HostDevice(deferred=True, seed=seed)
        m = typed_manager(slots=64, layers=2, device=device)
        kv, new = filled(m)
        indices = m.get_page_index_converter(0, "key")(row(kv), k.PageIndexMode.PER_LAYER)
        with JaxPools(m) as pools:
            np.testing.assert_array_equal(pools.read(read_tokens, indices)[:7], new[0])


def test_float4_pools_are_read_as_bytes():
    m = typed_manager(slots=64, layers=2, dtype="float4_e2m1fn")
    kv, new = filled(m, dtype="float4_e2m1fn")
    indices = m.get_page_index_converter(1, "key")(row(kv), k.PageIndexMode.PER_LAYER)
    with JaxPools(m) as pools:
        low = pools.read(jax.jit(lambda pages: pages[0][indices] & 15))
        np.testing.assert_array_equal(np.asarray(low).reshape(-1, H, D // 2)[:7], new[1] & 15)


def two_pools():
    kinds = {"key": (T * H * D * 4, (H, D)), "scales": (T * H * 4, (H,))}
    buffers = [
        k.BufferConfig(role=role, size=size, dtype="float32", shape=shape)
        for role, (size, shape) in kinds.items()
    ]
    config = k.KVCacheManagerConfig(
        tokens_per_block=T,
        cache_tiers=[k.GpuCacheTierConfig(quota=1 << 16)],
        layers=[k.AttentionLayerConfig(layer_id=0, buffers=buffers)],
    )
    return k.KVCacheManager(config, device="host")


def test_several_pools_come_in_the_order_of_their_keys():
    m = two_pools()
    m.get_pages(0, "key")[...], m.get_pages(0, "scales")[...] = 3, 5
    with JaxPools(m) as pools:
        assert len(pools.keys) == 2
        assert pools.read(jax.jit(lambda pages: [p.max() for p in pages])) == [3, 5]


# -- what must not happen to leased memory ---------------------------------------------------------


def test_a_pool_is_not_given_away():
    """A donated array would become somebody's scratch memory. JAX keeps what others use."""
    m = typed_manager(slots=64, layers=2)
    kv, new = filled(m)
    before = np.array(m.get_pages(0, "key"))
    give = jax.jit(lambda pages: tuple(7 * p for p in pages), donate_argnums=0)
    with JaxPools(m) as pools:
        (found,) = pools.read(give)
        np.testing.assert_array_equal(m.get_pages(0, "key"), before)
        assert found.unsafe_buffer_pointer() != m.pool_group_descs[0].pool_addresses[0]
        indices = m.get_page_index_converter(0, "key")(row(kv), k.PageIndexMode.PER_LAYER)
        np.testing.assert_array_equal(pools.read(read_tokens, indices)[:7], new[0])


def test_a_donation_that_happened_is_told(monkeypatch):
    m = typed_manager(slots=64, layers=2)
    pools = JaxPools(m)
    monkeypatch.setattr(JaxPools, "_guard", lambda self, pages: None)
    give = jax.jit(lambda pages: tuple(7 * p for p in pages), donate_argnums=0)
    with pytest.raises(k.StateError, match=r"pool \(0, 0\) was donated"):
        pools.read(give)
    pools.close()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda pages: None, "one that returns none"),
        (lambda pages: pages[0].shape, "one that returns none"),
        (lambda pages: pages, "one that returns pages"),
        (lambda pages: (pages[0].sum(), np.asarray(pages[0])[3:]), "one that returns pages"),
    ],
)
def test_a_function_returns_what_it_computed(function, text):
    m = typed_manager(slots=64, layers=2)
    with JaxPools(m) as pools:
        with pytest.raises(ValueError, match=text):
            pools.read(function)
        gc.collect()


@pytest.mark.parametrize(
    "transform",
    [
        lambda read: jax.jit(read)(1.0),
        lambda read: jax.vmap(read)(jnp.arange(3.0)),
        lambda read: jax.grad(read)(1.0),
    ],
)
def test_read_is_not_traced(transform):
    """It would read once, and what it read be a constant from then on."""
    m = typed_manager(slots=64, layers=2)
    pools = JaxPools(m)
    with pytest.raises(ValueError, match=r"returns tracers: call read\(\) outside of jit"):
        transform(lambda x: pools.read(lambda pages: x * pages[0].sum()))
    gc.collect()
    with suppress(k.LeaseInUse):  # jit keeps the constant
        pools.close()


def test_tracers_are_refused_before_a_pool_is_taken():
    """JAX keeps what a trace that failed has seen."""
    m = typed_manager(slots=64, layers=2)
    pools = JaxPools(m)
    read = jax.jit(lambda x: pools.read(lambda pages, y: pages[0].sum() + y, x))
    with pytest.raises(ValueError, match=r"arguments: expected arrays, got 'tracers'; call read"):
        read(1.0)
    pools.close()
    m.shutdown()


def test_results_that_jax_still_converts_are_waited_for():
    """With Python's lock free, which JAX's thread needs to let go of what it has converted.

    Without that wait a few hundred reads were enough to stand still.
    """
    code = """if 1:
        import faulthandler
        faulthandler.dump_traceback_later(90, exit=True)
        import jax
        import numpy as np
        from kvcore_adapters.for_jax import JaxPools
        from kvcore.dlpack.exporter import Exporter
        from kvcore.dlpack.view import view_of
        from tests.helpers import typed_manager
        wide = view_of(np.zeros(1 << 20, np.int64))
        with JaxPools(typed_manager()) as pools:
            for _ in range(1000):
                pools.read(lambda pages: jax.numpy.from_dlpack(Exporter(wide)))
        print("read")
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "read\n", done.stderr


def test_an_array_that_is_kept_holds_the_pool():
    m = typed_manager(slots=64, layers=2)
    pools = JaxPools(m)
    kept = array(pools._leases[0])
    with pytest.raises(k.LeaseInUse, match="pool 0 of layer group 0"):
        pools.close()
    with pytest.raises(k.LeaseInUse):
        m.shutdown()
    del kept
    pools.close()
    m.shutdown()


def test_a_kept_array_does_not_keep_the_other_pools():
    m = two_pools()
    pools = JaxPools(m)
    kept = array(pools._leases[0])
    with pytest.raises(k.LeaseInUse, match="pool 0 of layer group 0"):
        pools.close()
    assert not any(lease.is_open for lease in pools._leases)
    del kept
    gc.collect()
    m.shutdown()


def test_reads_leave_nothing():
    m = typed_manager(slots=64, layers=2)
    pools = JaxPools(m)
    sums = jax.jit(lambda pages: pages[0].sum())
    for _ in range(200):
        pools.read(sums)
    pools.close()
    assert not m._runtime.leases
    m.shutdown()


def test_an_error_inside_is_the_functions():
    m = typed_manager(slots=64, layers=2)

    def broken(pages):
        raise KeyError(len(pages))

    with pytest.raises(KeyError), JaxPools(m) as pools:
        pools.read(broken)
    gc.collect()
    m.shutdown()


@pytest.mark.parametrize(("make", "blocks"), [(jax.random.key, 1), (jnp.int4, 1), (jnp.float32, 0)])
def test_results_that_dlpack_lacks_are_waited_for(make, blocks, monkeypatch):
    """On a GPU, where events order everything else."""
    result, blocked = make(3), []
    monkeypatch.setattr(jax, "block_until_ready", blocked.append)
    for_jax._order_behind(result, None)
    assert len(blocked) == blocks


def test_arrays_of_jax_are_appended():
    m = typed_manager(slots=64, layers=2, dtype="bfloat16")
    (kv,) = opened(m, 7)
    step = m.create_batch(1, 8)
    step.prepare([kv], 7)
    new = jnp.arange(2 * 7 * H * D, dtype=jnp.bfloat16).reshape(2, 7, H, D)
    step.append([0, 1], {"key": new, "value": new})
    found, _ = step.gather([0, 1])
    np.testing.assert_array_equal(found, np.asarray(new).view(np.uint16))


def test_what_is_no_lease_or_manager_is_named():
    with pytest.raises(TypeError, match="lease: expected a Lease"):
        array(None)
    with pytest.raises(TypeError, match="manager: expected a KVCacheManager"):
        JaxPools(None)
