"""Frameworks that have no adapter read pages in place: `examples/pages_*.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import numpy as np
import pytest

from examples.pages_setup import LAYERS, LENGTH, T, expected, query, sequence

ROOT = Path(__file__).parent.parent

COMPARE = """
import numpy as np
from examples import pages_{name}
from examples.pages_setup import expected, query, sequence
its = sequence()
for layer in (0, 1):
    for sign in (1, -1):  # the second time after kvcore has written other values to the pages
        for array in its.tokens.values():
            array *= sign
        its.batch.append([0, 1], its.tokens)
        got = pages_{name}.run(its, layer)
        np.testing.assert_allclose(got, expected(query(), its, layer), rtol=0, atol=2e-6)
print("compared")
"""


def test_the_sequence_has_pages_apart_and_both_ways_lead_to_them():
    its = sequence()
    assert its.slots.tolist() == [0, 2, 4]
    for layer in range(LAYERS):
        for role, tokens in its.tokens.items():
            rows = its.pages(layer, role)[its.slots].reshape(-1, *tokens.shape[2:])
            np.testing.assert_array_equal(rows[:LENGTH], tokens[layer])
            pages = its.pool()[its.numbers(layer, role)]
            np.testing.assert_array_equal(pages, its.pages(layer, role)[its.slots])
            assert pages.shape[1] == T
    assert its.pool().ctypes.data == its.manager.pool_group_descs[0].pool_addresses[0]
    assert np.abs(expected(query(), its, 0)).max() > 0.1  # far from the tolerance below


@pytest.mark.parametrize("name", ["numba", "warp", "tensorflow", "tinygrad"])
def test_attention_over_pages_equals_the_dense_one(name, tmp_path):
    """In a process of its own, so that no framework meets another's runtime or warnings."""
    if find_spec(name) is None or (name == "tinygrad" and not which("clang")):
        pytest.skip(f"needs {name}, see examples/README.md")
    program = COMPARE.format(name=name)
    caches = ("WARP_CACHE_PATH", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    env = os.environ | dict.fromkeys(caches, str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "compared"
