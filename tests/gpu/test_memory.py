"""Pool memory on a real driver: nothing leaks, views are safe, other threads and processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import cupy
import numpy as np
import pytest

from kvcore.device.cuda import CudaDevice
from kvcore.errors import OutOfMemoryError
from tests.gpu.tools import delay, device_count, free_bytes, held

MIB = 1 << 20
SLACK = 16 * MIB
"""What the driver may keep for itself; the tests move at least twice as much."""

CHUNK = 32 * MIB
ROOT = Path(__file__).parents[2]


@pytest.fixture
def baseline():
    """Free memory is what it was before, once everything is closed."""
    warm = CudaDevice(0)
    warm.reserve(2 * MIB, 2 * MIB, 2 * MIB).close()
    stream = warm.create_stream()
    words = warm.empty(4, np.int32)
    warm.from_host(np.zeros(4, np.int32), words, stream=stream)
    warm.to_host(words, stream=stream)
    del words, stream
    warm.close()
    cupy.get_default_memory_pool().free_all_blocks()
    before = free_bytes()
    yield
    gc.collect()
    CudaDevice(0).close()  # frees what was dropped
    cupy.get_default_memory_pool().free_all_blocks()
    assert abs(free_bytes() - before) <= SLACK


@pytest.mark.no_sanitizer
def test_map_and_unmap_leaves_no_memory_behind(baseline, device):
    start = free_bytes()
    for cycle in range(300):
        memory = device.reserve(512 * MIB, 256 * MIB, CHUNK)
        if not cycle:
            assert start - free_bytes() >= 256 * MIB
        memory.close()
    assert abs(free_bytes() - start) <= SLACK
    memory = device.reserve(32 * CHUNK, 2 * CHUNK, CHUNK)
    for chunks in (3, 4, 1, 32, 2):
        memory.resize(chunks * CHUNK)
        assert abs(start - free_bytes() - chunks * CHUNK) <= SLACK
    memory.close()
    memory.close()
    assert abs(free_bytes() - start) <= SLACK


@pytest.mark.no_sanitizer
def test_running_out_changes_nothing(baseline, device):
    start = free_bytes()
    memory = device.reserve(2 * start, 64 * MIB, 512 * MIB)
    words = memory.array(np.int32, (1024,))
    stream = device.create_stream()
    device.fill_words(words, 77, stream=stream)
    held_before = free_bytes()
    with pytest.raises(OutOfMemoryError, match="cuMem"):
        memory.resize(2 * start)
    assert memory.nbytes == 512 * MIB
    assert abs(free_bytes() - held_before) <= SLACK
    assert set(device.to_host(words, stream=stream).tolist()) == {77}
    memory.resize(1024 * MIB)
    words = None
    memory.close()


def test_growing_waits_for_nobody_and_erases_nothing(rig):
    """New memory is the user's at once: nothing prepares it later, on a stream that is busy."""
    grain = 2 * MIB
    memory = rig.device.reserve(16 * grain, grain, grain)
    rig.owned.append(memory)
    busy = rig.device.create_stream()
    first = memory.array(np.int32, (grain // 4,))
    other = rig.device.create_stream()
    delay(rig.device, busy, 50)
    rig.device.fill_words(first, 1, stream=busy)
    memory.resize(5 * grain)
    new = memory.array(np.int32, (grain,), grain)
    rig.device.fill_words(new, 42, stream=other)
    assert set(rig.device.to_host(new, stream=other).tolist()) == {42}
    busy.synchronize()
    assert set(rig.get(new).tolist()) == {42}
    assert set(rig.get(first).tolist()) == {1}


def test_shrinking_after_work_has_ended(rig):
    grain = 2 * MIB
    memory = rig.device.reserve(8 * grain, 8 * grain, grain)
    rig.owned.append(memory)
    base = memory.base
    whole = memory.array(np.int32, (2 * grain,))
    delay(rig.device, rig.stream, 20)
    rig.device.fill_words(whole, 3, stream=rig.stream)
    rig.stream.synchronize()
    memory.resize(grain)
    assert (memory.base, memory.nbytes) == (base, grain)
    kept = memory.array(np.int32, (grain // 4,))
    assert set(rig.get(kept).tolist()) == {3}


@pytest.mark.no_sanitizer
def test_closed_from_a_thread_without_a_context(baseline, device):
    start = free_bytes()
    memory = device.reserve(64 * MIB, 64 * MIB, 2 * MIB)
    thread = threading.Thread(target=memory.close)
    thread.start()
    thread.join()
    assert abs(free_bytes() - start) <= SLACK


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_dropped_in_another_thread(baseline, device, in_a_cycle):
    start = free_bytes()
    box = [device.reserve(64 * MIB, 64 * MIB, 2 * MIB)]
    if in_a_cycle:
        box.append(box)

    def drop():
        nonlocal box
        box = None
        gc.collect()

    def drop_elsewhere():
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()

    with pytest.warns(ResourceWarning, match="not closed"):
        drop_elsewhere()
    device.collect()
    assert abs(free_bytes() - start) <= SLACK


@pytest.mark.no_sanitizer
def test_arrays_of_a_stream_are_reused_in_its_order(rig):
    """A block goes on to the next array of the stream while the old one's work still runs."""
    rig.device.empty(1 << 16, np.int32, stream=rig.stream)  # allocating may wait
    with held(rig.device, rig.stream):
        old = rig.device.empty(1 << 16, np.int32, stream=rig.stream)
        place = old.data.ptr
        rig.device.fill_words(old, 1, stream=rig.stream)
        del old
        new = rig.device.empty(1 << 16, np.int32, stream=rig.stream)
        rig.device.fill_words(new, 2, stream=rig.stream)
        assert new.data.ptr == place
        assert not rig.stream.record().done()
    assert set(rig.get(new).tolist()) == {2}


def test_threads_on_their_own_default_streams_share_nothing(device):
    """Handle 2 is another stream in every thread: what one dropped is not the other's."""
    stream = device.stream(2)
    found = []

    def first():
        array = device.empty(1 << 20, np.int32, stream=stream)
        delay(device, stream, 30)
        device.fill_words(array, 7, stream=stream)

    def second():
        array = device.empty(1 << 20, np.int32, stream=stream)
        device.fill_words(array, 5, stream=stream)
        found.append(device.to_host(array, stream=stream))

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
        thread.join()
    assert set(found[0].tolist()) == {5}


def test_foreign_arrays_share_memory(rig):
    """CuPy's own arrays, and torch's where torch sees the GPU."""
    array = cupy.arange(1000, dtype=cupy.int32)
    cupy.cuda.runtime.deviceSynchronize()
    assert rig.device.as_array(array) is array
    rig.device.fill_words(array, -4, stream=rig.stream)
    assert set(rig.get(array).tolist()) == {-4}
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    for dtype in (torch.int32, torch.bfloat16, torch.float16, torch.uint8):
        tensor = torch.ones(24, device="cuda").to(dtype).reshape(4, 6).T
        torch.cuda.synchronize()
        taken = rig.device.as_array(tensor)
        assert taken.data.ptr == tensor.data_ptr()
        assert (taken.shape, taken.dtype.itemsize) == ((6, 4), tensor.element_size())
        expected = tensor.contiguous().view(torch.uint8).cpu().numpy()
        assert rig.get(taken).tobytes() == expected.tobytes()


def test_memory_is_seen_by_others_without_a_copy(rig):
    memory = rig.reserve(4 * MIB, 4 * MIB)
    view = memory.array(np.int32, (100,), 2 * MIB)
    rig.device.fill_words(view, 9, stream=rig.stream)
    rig.stream.synchronize()
    alias = cupy.from_dlpack(view)
    assert alias.data.ptr == view.data.ptr == memory.base + 2 * MIB
    assert set(alias.get().tolist()) == {9}


@pytest.mark.no_sanitizer
def test_a_forked_child_is_told_and_the_parent_goes_on(rig):
    memory = rig.reserve(4 * MIB, 4 * MIB)
    words = memory.array(np.int32, (100,))
    rig.device.fill_words(words, 9, stream=rig.stream)
    rig.stream.synchronize()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fork in a process with threads
        child = os.fork()
    if not child:
        text = "nothing was raised"
        try:
            rig.device.fill_words(words, 1, stream=rig.stream)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reader, 4096).decode()
    os.close(reader), os.close(writer)
    assert found.startswith("StateError: CUDA does not survive fork()")
    assert set(rig.get(words).tolist()) == {9}


@pytest.mark.no_sanitizer
def test_the_interpreter_ends_quietly_with_everything_open():
    code = """
import numpy as np
from kvcore.device.cuda import CudaDevice
device = CudaDevice(0)
memory = device.reserve(1 << 22, 1 << 22, 1 << 21)
stream = device.create_stream()
array = device.empty(10, np.int32, stream=stream)
event = stream.record()
device.fill_words(array, 1, stream=stream)
device.from_host(np.arange(10, dtype=np.int32), array, stream=stream)
print(device.to_host(array, stream=stream).sum())
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "45\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_gpu_has_its_own_memory():
    if device_count() < 2:
        pytest.skip("needs a second GPU")
    first, second = CudaDevice(0), CudaDevice(1)
    memories = [its.reserve(4 * MIB, 4 * MIB, 2 * MIB) for its in (first, second)]
    for value, (its, memory) in enumerate(zip((first, second), memories, strict=True)):
        stream = its.create_stream()
        words = memory.array(np.int32, (1 << 20,))
        its.fill_words(words, value, stream=stream)
        assert set(its.to_host(words, stream=stream).tolist()) == {value}
        with pytest.raises(TypeError):
            (second if its is first else first).as_array(words)
        words = None
    for memory in memories:
        memory.close()
    assert cupy.cuda.runtime.getDevice() == 0
    first.close()
    second.close()
