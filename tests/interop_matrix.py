"""What each framework makes of each type and layout, found by trying; and the tables of that.

`python -m tests.interop_matrix` prints the tables of `docs/interop.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvcore.device.host import HostDevice
from kvcore.dlpack.capsules import api
from kvcore.dlpack.codes import CODES, UNKNOWN_TO_NUMPY, bits_name
from kvcore.dlpack.exporter import Exporter
from kvcore.dlpack.importer import from_capsule
from kvcore.dlpack.view import ArrayView, view_of

SHARED = "shared"
CAST = "bits, cast by the consumer"
REFUSED = "`BufferError`"
NONE = "no such array"

TYPES = [name for name in CODES if not name.startswith("complex")]
VERSIONS = [None, (0, 8), (1, 0), (1, 1), (1, 3)]
FRAMEWORKS = ["numpy", "torch", "jax"]
LINE = 128  # elements of the last axis: whole cache lines, also of float4


class Layout(NamedTuple):
    """A dense array, and what is cut from it. Cuts work on arrays of any framework with strides."""

    shape: tuple[int, ...]
    cut: Callable[[Any], Any]


def whole(a):
    return a


LAYOUTS = {
    "0 axes": Layout((), whole),
    "1 axis": Layout((LINE,), whole),
    "2 axes": Layout((3, LINE), whole),
    "3 axes": Layout((2, 3, LINE), whole),
    "4 axes": Layout((2, 3, 4, LINE), whole),
    "5 axes": Layout((2, 1, 3, 2, LINE), whole),
    "6 axes": Layout((2, 1, 2, 3, 2, LINE), whole),
    "no elements": Layout((1, 8, 0, LINE), whole),
    "axes of one element": Layout((4, 3, LINE), lambda a: a[1:2, 2:3]),
    "behind an offset": Layout((5, LINE), lambda a: a[2:]),
    "gaps between pages": Layout((4, 6, LINE), lambda a: a[:, 2:4]),
    "every other element": Layout((4, LINE), lambda a: a[:, ::2]),
    "transposed": Layout((4, LINE), lambda a: a.T),
    "repeated (stride 0)": Layout((2, LINE), lambda a: repeated(a)),
    "backwards": Layout((4, LINE), lambda a: a[::-1]),
}


def repeated(a):
    """The first row, three times."""
    if isinstance(a, np.ndarray):
        return np.lib.stride_tricks.as_strided(a, (3, a.shape[1]), (0, a.strides[1]))
    return a[:1].expand(3, -1)


def dense_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Aligned memory full of bits, as the integers that NumPy sees."""
    kind = np.dtype(bits_name(dtype) if dtype in UNKNOWN_TO_NUMPY else dtype)
    if CODES[dtype].bits == 4:
        shape = (*shape[:-1], shape[-1] // 2) if shape else shape
    nbytes = prod(shape) * kind.itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    rng = np.random.default_rng(nbytes)
    memory[start : start + nbytes] = rng.integers(0, 2 if dtype == "bool" else 120, nbytes)
    return memory[start : start + nbytes].view(kind).reshape(shape)


def exported(dtype: str, layout: Layout) -> tuple[Exporter, np.ndarray]:
    """A producer of ours, and its bits."""
    cut = layout.cut(dense_bits(dtype, layout.shape))
    return Exporter(view_of(cut, dtype if dtype in UNKNOWN_TO_NUMPY else None)), cut


def pointer(its: Any) -> int:
    """Where an array of a framework begins."""
    if isinstance(its, np.ndarray):
        return its.ctypes.data
    if hasattr(its, "data_ptr"):
        return its.data_ptr()
    return its.block_until_ready().unsafe_buffer_pointer()  # JAX may still be copying


def bits_of(its: Any) -> np.ndarray:
    """The elements of an array of a framework as bytes, row after row."""
    if hasattr(its, "data_ptr"):
        import torch

        its = its.contiguous()
        return its.reshape(-1).view(torch.uint8).numpy() if its.numel() else np.zeros(0, np.uint8)
    return np.ascontiguousarray(np.asarray(its)).reshape(-1).view(np.uint8)


def same(its: Any, wanted: np.ndarray) -> bool:
    """Whether an array of a framework is those bits at that place."""
    if wanted.size and pointer(its) != wanted.ctypes.data:
        raise AssertionError(f"a copy: {pointer(its):#x} instead of {wanted.ctypes.data:#x}")
    np.testing.assert_array_equal(bits_of(its), bits_of(wanted))
    if tuple(its.shape) != wanted.shape:
        raise AssertionError(f"shape {tuple(its.shape)} instead of {wanted.shape}")
    return True


# -- from kvcore -----------------------------------------------------------------------------------


def adapter(framework: str) -> Callable[[Exporter], Any]:
    """What an adapter makes of a producer of ours."""
    if framework == "numpy":
        from kvcore_adapters.for_numpy import array

        return array
    if framework == "torch":
        from kvcore_adapters.for_torch import tensor

        return tensor
    from kvcore_adapters.for_jax import array as jax_array

    return jax_array


def given(framework: str, dtype: str, layout: Layout) -> str:
    """What happens to a producer of ours in an adapter."""
    try:
        ours, bits = exported(dtype, layout)
    except BufferError:
        return NONE  # there is no such array
    try:
        return SHARED * same(adapter(framework)(ours), bits)
    except BufferError:
        pass
    try:
        ours = ours.bits()
        return (CAST if dtype in UNKNOWN_TO_NUMPY else SHARED) * same(
            adapter(framework)(ours), bits
        )
    except BufferError:
        return REFUSED


class Raw:
    """A producer of ours for a consumer of a version."""

    def __init__(self, ours: Exporter, version: Any) -> None:
        self.ours, self.version = ours, version

    def __dlpack_device__(self):
        return self.ours.__dlpack_device__()

    def __dlpack__(self, **_):
        return self.ours.__dlpack__(max_version=self.version)


def importer(framework: str) -> Callable[[Any], Any]:
    """The framework's own `from_dlpack`."""
    if framework == "numpy":
        return np.from_dlpack
    if framework == "torch":
        import torch

        return torch.from_dlpack
    import jax

    return jax.numpy.from_dlpack


def given_raw(framework: str, dtype: str, version: Any) -> str:
    """What happens where the framework asks by itself, as a consumer of a version."""
    ours, bits = exported(dtype, LAYOUTS["3 axes"])
    try:
        capsule = ours.__dlpack__(max_version=version)
    except BufferError:
        ours, outcome = ours.bits(), CAST  # as the message says
    else:
        outcome = f"{SHARED}, {api().find(capsule)[1].decode()}"
        del capsule
    try:
        return outcome * same(importer(framework)(Raw(ours, version)), bits)
    except (BufferError, RuntimeError) as error:  # of the framework
        return f"{type(error).__name__} of {framework}"


# -- to kvcore -------------------------------------------------------------------------------------


def foreign(framework: str, dtype: str, layout: Layout) -> tuple[Any, Any] | None:
    """An array of a framework, and its elements as bytes; None if there is none like that."""
    bits = dense_bits(dtype, layout.shape)
    if framework == "numpy":
        if dtype in UNKNOWN_TO_NUMPY:
            return None
        its = layout.cut(bits)
    elif framework == "torch":
        import torch
        from kvcore_adapters.for_torch import torch_type

        if layout is LAYOUTS["backwards"]:
            return None
        its = layout.cut(torch.from_numpy(bits).view(torch_type(dtype)))
        if CODES[dtype].bits == 4 and (not its.dim() or its.stride(-1) != 1):
            return None  # pairs that are no neighbours
    else:
        import jax

        if layout.cut is not whole or dtype.endswith("64") or dtype.startswith("float4"):
            return None
        kind = getattr(jax.numpy, dtype if dtype != "bool" else "bool_")
        its = jax.device_put(bits.view(np.dtype(kind)), jax.devices("cpu")[0])
    return its, bits_of(its)


def taken(framework: str, dtype: str, layout: Layout) -> str:
    """What `Device.as_array` makes of an array of a framework."""
    found = foreign(framework, dtype, layout)
    if found is None:
        return NONE
    its, bits = found
    mine = HostDevice().as_array(its, dtype=dtype)
    if mine.size and mine.ctypes.data != pointer(its):
        raise AssertionError("a copy")
    np.testing.assert_array_equal(bits_of(mine), bits)
    return SHARED


class Limited:
    """A framework's array whose producer knows versions up to one; None: only the old protocol."""

    def __init__(self, its: Any, version: Any) -> None:
        self.its, self.version = its, version

    def capsule(self):
        if self.version is None:
            return self.its.__dlpack__()
        return self.its.__dlpack__(max_version=self.version)


def taken_raw(framework: str, dtype: str, version: Any) -> str:
    """What the importer makes of a framework's capsule of a version."""
    found = foreign(framework, dtype, LAYOUTS["3 axes"])
    if found is None:
        return NONE
    its, bits = found
    try:
        capsule = Limited(its, version).capsule()
    except BufferError as error:
        return f"BufferError of {framework}: {error}"
    name = api().find(capsule)[1].decode()
    view: ArrayView = from_capsule(capsule)
    if view.address != pointer(its) or view.dtype != dtype:
        raise AssertionError((view.dtype, dtype))
    np.testing.assert_array_equal(bits_of(view.numpy()), bits)
    return f"{SHARED}, {name}"


# -- tables ----------------------------------------------------------------------------------------


def one_of(outcomes: set[str]) -> str:
    """What several cells have in common."""
    outcomes -= {NONE}
    return outcomes.pop() if len(outcomes) == 1 else " / ".join(sorted(outcomes)) or NONE


DENSE = [name for name, layout in LAYOUTS.items() if layout.cut is whole]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables() -> str:
    """The tables of the documentation, as Markdown."""
    head = ["", *(f"to {f}" for f in FRAMEWORKS), *(f"from {f}" for f in FRAMEWORKS)]

    def both(types: list[str], layouts: list[str]) -> list[str]:
        cells = [(call, f) for call in (given, taken) for f in FRAMEWORKS]
        return [
            one_of({call(f, t, LAYOUTS[name]) for t in types for name in layouts})
            for call, f in cells
        ]

    by_type = [[f"`{t}`", *both([t], DENSE)] for t in TYPES]
    by_layout = [[name, *both(["float32"], [name])] for name in LAYOUTS]
    by_version = []
    for version in VERSIONS:
        name = "none" if version is None else f"{version[0]}.{version[1]}"
        by_version.append([name, *structures(version)])
    return "\n\n".join(
        [
            table(["type", *head[1:]], by_type),
            table(["layout, of float32", *head[1:]], by_layout),
            table(["`max_version`", "structure", "types NumPy has, bfloat16", "float8, float4"],
                  by_version),
        ]
    )  # fmt: skip


def structures(version: Any) -> list[str]:
    """Which structure a consumer gets, and which types it can be told."""
    cells = []
    name = ""
    for types in (("float32", "bool", "bfloat16"), ("float8_e4m3fn", "float4_e2m1fn")):
        for dtype in types:
            ours, _ = exported(dtype, LAYOUTS["3 axes"])
            try:
                capsule = ours.__dlpack__(max_version=version)
            except BufferError:
                outcome = f"{REFUSED}: take `bits()`"
            else:
                name, outcome = api().find(capsule)[1].decode(), "type code"
        cells.append(outcome)
    return [f"`{name}`", *cells]


def missing() -> list[str]:
    """Frameworks that are not installed."""
    return [name for name in FRAMEWORKS if find_spec(name) is None]


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")
