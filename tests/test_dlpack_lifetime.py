"""How long an exported array lives: whoever drops it, wherever, and however often."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvcore.dlpack.capsules import api
from kvcore.dlpack.exporter import Exporter
from kvcore.dlpack.exports import exports
from kvcore.dlpack.importer import from_capsule
from kvcore.dlpack.view import view_of


def numbers(*shape: int) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


@pytest.fixture(autouse=True)
def nothing_stays_out():
    gc.collect()
    before = len(exports())
    yield
    gc.collect()
    assert len(exports()) == before


class Memory(np.ndarray):
    """An array that can be watched."""


def watched() -> tuple[Exporter, list[int]]:
    """An exporter, and a list that gets an entry when its memory is given back."""
    array = numbers(2, 3).view(Memory)
    gone: list[int] = []
    weakref.finalize(array, gone.append, 1)
    return Exporter(view_of(array)), gone


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_unused_capsules_give_back_what_they_hold(version):
    ours, gone = watched()
    capsule = ours.__dlpack__(max_version=version)
    del ours
    gc.collect()
    assert not gone
    del capsule
    assert gone == [1]


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_is_used_once(version):
    ours, gone = watched()
    capsule = ours.__dlpack__(max_version=version)
    taken = from_capsule(capsule)
    with pytest.raises(BufferError, match="can be used once"):
        from_capsule(capsule)
    name = b"used_dltensor" if version is None else b"used_dltensor_versioned"
    assert api().is_named(capsule, name)
    del capsule, ours
    assert not gone
    del taken
    assert gone == [1]


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_two_views_of_one_array_end_by_themselves(version):
    ours, gone = watched()
    one, two = (from_capsule(ours.__dlpack__(max_version=version)) for _ in range(2))
    del ours, one
    assert not gone
    assert two.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    del two
    assert gone == [1]


def resident() -> int:
    """Bytes of memory that the process has; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else 0


class Library:
    """A consumer that hands its capsule on, and counts the arrays it makes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def take(self, ours: Exporter):
        if self.name == "numpy":
            return np.from_dlpack(ours)
        module = pytest.importorskip(self.name)
        return (module.numpy if self.name == "jax" else module).from_dlpack(ours)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_deleter_keeps_an_exception_that_is_on_its_way(name):
    """The array is dropped by the call that fails, after it failed."""
    ours, gone = watched()
    library = Library(name)
    with pytest.raises((ValueError, RuntimeError), match=r"reshape|shape '\[7\]'"):
        library.take(ours).reshape(7)
    del ours
    assert gone == [1]


def test_a_refused_capsule_keeps_the_exception_too():
    ours = Exporter(view_of(np.zeros(4, np.uint16), "bfloat16"))
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported dtype"):
        np.from_dlpack(ours)


class Deleters:
    """Calls deleters from C, in threads that Python did not start."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)

    def call(self, managed) -> None:
        """In a new thread of the C library, without the interpreter's lock; waits for it."""
        thread = ctypes.c_ulong()
        start = ctypes.c_void_p(managed.deleter), ctypes.c_void_p(ctypes.addressof(managed))
        assert self._libc.pthread_create(ctypes.byref(thread), None, *start) == 0
        assert self._libc.pthread_join(thread, None) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="threads of POSIX")
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_thread_of_c_calls_the_deleter(version):
    ours, gone = watched()
    managed = api().take_over(ours.__dlpack__(max_version=version))
    del ours
    assert not gone
    Deleters().call(managed)
    assert gone == [1]


def test_a_thread_of_python_drops_the_last_array():
    ours, gone = watched()
    held = [np.from_dlpack(ours)]
    del ours
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert gone == [1]


def test_a_consumer_that_raises_after_it_took_over_frees_once():
    ours, gone = watched()

    def consume(capsule):
        taken = from_capsule(capsule)
        raise KeyError(taken.shape)

    with pytest.raises(KeyError):
        consume(ours.__dlpack__(max_version=(1, 0)))
    del ours
    gc.collect()
    assert gone == [1]


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "nobody"])
def test_a_hundred_thousand_times_leaves_nothing(name):
    """References to the array, live structures and allocated blocks are what they were."""
    array = numbers(4, 4)
    ours, library = Exporter(view_of(array)), Library(name)

    def once():
        if name == "nobody":
            ours.__dlpack__(max_version=(1, 0))
        else:
            library.take(ours)

    for _ in range(100):
        once()
    gc.collect()
    before = sys.getrefcount(array), len(exports()), sys.getallocatedblocks()
    for number in range(100_000):
        if number == 50_000:  # JAX itself keeps something until a collection, of anybody's arrays
            gc.collect()
            memory = resident()
        once()
    gc.collect()
    after = sys.getrefcount(array), len(exports()), sys.getallocatedblocks()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 1000
    assert resident() - memory < 24 * 50_000  # the C library gives out 32 bytes at least


def test_a_structure_of_another_major_version_is_only_deleted():
    ours, gone = watched()
    capsule = ours.__dlpack__(max_version=(1, 0))
    api().find(capsule)[0].major = 2
    with pytest.raises(BufferError, match=r"DLPack 2\.0 is not understood"):
        from_capsule(capsule)
    del ours
    assert gone == [1]
