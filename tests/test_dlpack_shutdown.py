"""What consumers hold when the interpreter ends: nobody calls back, nothing is pulled away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BEGIN = """
import atexit, ctypes, sys, threading
import numpy as np
from kvcore.dlpack.capsules import api
from kvcore.dlpack.exporter import Exporter
from kvcore.dlpack.exports import exports
from kvcore.dlpack.view import view_of
whole = np.zeros(1024, np.float32)
start = -whole.ctypes.data % 64 // 4  # JAX shares what is aligned, and copies the rest
array = whole[start:start + 64].reshape(8, 8)
ours = Exporter(view_of(array))
libc = ctypes.CDLL(None)
"""

HOLD = {
    "numpy": "held = [np.from_dlpack(ours) for _ in range(3)]",
    "torch": "import torch; held = [torch.from_dlpack(ours) for _ in range(3)]",
    "jax": "import jax.numpy as jnp; held = [jnp.from_dlpack(ours) for _ in range(3)]",
    "capsules": "held = [ours.__dlpack__(), ours.__dlpack__(max_version=(1, 0))]",
    "cycles": "held = [np.from_dlpack(ours)]; me = [held]; held.append(me)",
    "a frame": """
def generator():
    taken = np.from_dlpack(ours)
    yield taken
held = generator(); next(held)
""",
}


def run(code: str, before: str = "") -> str:
    """The output of a process that must end well and say nothing else."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", before + BEGIN + code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize("how", HOLD)
def test_arrays_that_are_held_at_the_end(how):
    if how in ("torch", "jax"):
        pytest.importorskip(how)
    assert run(HOLD[how] + "\nprint(len(exports()) > 0)") == "True\n"


def test_structures_get_a_deleter_that_does_nothing_also_new_ones():
    """A handler that was registered before runs after ours."""
    before = "import atexit; atexit.register(lambda: look())"
    code = """
def look():
    late = api().take_over(ours.__dlpack__(max_version=(1, 0)))
    for its in (managed, late):
        print(its.deleter == nothing, its.tensor.data == array.ctypes.data)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(its.deleter)(ctypes.addressof(its))
    print(len(exports()))
nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
managed = api().take_over(ours.__dlpack__(max_version=(1, 0)))
print(managed.deleter == nothing)
"""
    assert run(code, before) == "False\nTrue True\nTrue True\n2\n"


def test_an_engines_handler_ends_leases_and_managers():
    """Registered before the first array was taken."""
    code = """
from tests.helpers import typed_manager
def stop():
    global held
    held = None
    lease.close(), manager.shutdown()
    print("stopped", len(exports()))
atexit.register(stop)
manager = typed_manager()
lease = manager.lease(0, "key")
held = np.from_dlpack(lease)
"""
    assert run(code) == "stopped 0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs __cxa_atexit")
@pytest.mark.parametrize("version", ["None", "(1, 0)"])
def test_a_deleter_that_is_called_when_the_interpreter_is_gone(version):
    """A consumer that kept the pointer, as static objects of C++ do, and calls it at the end."""
    code = f"""
for _ in range(3):
    managed = api().take_over(ours.__dlpack__(max_version={version}))
    place = ctypes.c_void_p(ctypes.addressof(managed))
    assert libc.__cxa_atexit(ctypes.c_void_p(managed.deleter), place, None) == 0
print(len(exports()))
"""
    assert run(code) == "3\n"


@pytest.mark.skipif(sys.platform == "win32", reason="threads of POSIX")
def test_threads_of_c_that_drop_arrays_while_the_interpreter_ends():
    """Each reads the deleter and calls it, as consumers do, at any moment around the end."""
    code = """
drops = []
nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
def drop_many():
    while True:
        managed = api().take_over(ours.__dlpack__(max_version=(1, 0)))
        if managed.deleter == nothing:
            return
        thread = ctypes.c_ulong()
        start = ctypes.c_void_p(managed.deleter), ctypes.c_void_p(ctypes.addressof(managed))
        if libc.pthread_create(ctypes.byref(thread), None, *start):
            return
        libc.pthread_detach(thread)
        drops.append(1)
for _ in range(3):
    threading.Thread(target=drop_many, daemon=True).start()
while len(drops) < 300:
    np.from_dlpack(ours)
print("end")
"""
    for _ in range(5):
        assert run(code) == "end\n"
