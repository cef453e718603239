"""The kernel sources as a shared library for the CPU, built with the system's C++ compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.device.cuda.kernels import SOURCES, Source

SHIM = Path(__file__).parent / "cpu_shim.h"
MACROS = ("THREADS", "VECTORS", "CHUNK", "STREAM_STORES", "KERNEL", "MAX_ROLES", "MAX_POOLS")
MACROS += ("MAX_INLINE", "MAX_DIMS", "APPEND", "GATHER", "COPY_PAGES", "FILL_PAGES", "COPY_STRIDED")
MACROS += ("WARPS", "MAX_SHIFT", "MAX_KINDS", "WARP_UNITS", "COPY_TAILS", "MAX_ARRAYS")
MACROS += ("PERMUTE", "MAX_TABLE_POOLS")
CHECKS = ("-fsanitize=undefined", "-fno-sanitize=vptr")
"""Tells, on the standard error stream, of misaligned accesses and numbers that overflow."""


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def tuned(threads: int | None = None, vectors: int | None = None) -> list[Source]:
    """All sources, with other tunables where they are given."""
    return [
        replace(source, threads=threads or source.threads, vectors=vectors or source.vectors)
        for source in SOURCES.values()
    ]


def translation(sources: Iterable[Source]) -> str:
    """One C++ file: each source in a namespace of its own, then `run_*` for its entry points."""
    parts = [f'#include "{SHIM.name}"']
    for source in sources:
        parts += [f"#undef {macro}" for macro in MACROS]
        parts.append(f"#define THREADS {source.threads}")
        parts.append(f"#define VECTORS {source.vectors}")
        parts.append(f"namespace source_{source.name} {{\n{source.text()}\n}}")
        parts += [runner(source, entry) for entry in source.entries]
        parts += [layout(source, struct) for struct in source.structs]
    return "\n".join(parts)


def struct_of(source: Source, entry: str) -> str:
    """The C++ name of an entry point's argument."""
    return next(name for name, its in source.structs.items() if its is source.entries[entry])


def runner(source: Source, entry: str) -> str:
    """`run_entry(packed arguments, grid, threads, bytes of shared memory, seed)`."""
    space = f"source_{source.name}"
    turns = "true" if "__syncthreads" in source.text() else "false"
    types = f"{space}::{struct_of(source, entry)}, {turns}, {space}::{entry}"
    return f"""extern "C" void run_{entry}(
    const void* packed, const unsigned* grid, unsigned threads, unsigned shared, unsigned seed) {{
    run_grid<{types}>(packed, grid, threads, shared, seed);
}}"""


def layout(source: Source, struct: str) -> str:
    """`layout_source_struct`: its size, and the offset of each of its fields."""
    name = f"source_{source.name}::{struct}"
    names = source.structs[struct].names or ()
    offsets = "".join(f", __builtin_offsetof({name}, {field})" for field in names)
    return (
        f'extern "C" const unsigned long layout_{source.name}_{struct}[] = '
        f"{{sizeof({name}){offsets}}};"
    )


def build(folder: Path, sources: Iterable[Source], *flags: str) -> Path:
    """Compiles the sources into a shared library in `folder`; gives its path."""
    text, library = folder / "kernels.cpp", folder / "kernels.so"
    text.write_text(translation(sources), "utf-8")
    command = [compiler(), "-std=c++17", "-O1", "-g1", "-shared", "-fPIC", "-Wall", "-Wextra"]
    command += ["-Wno-unused-variable", "-Wno-unknown-pragmas", "-Wno-unused-function"]
    command += [*flags, f"-I{SHIM.parent}", "-o", str(library), str(text)]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the kernels do not compile as C++:\n{done.stderr}")
    return library


class CpuKernels:
    """Calls the kernels of a library built by `build`."""

    def __init__(self, library: Path, sources: Iterable[Source], seed: int = 0) -> None:
        self._library, self.seed = ctypes.CDLL(str(library)), seed
        self.sources = {source.name: source for source in sources}

    def run(
        self,
        name: str,
        entry: str,
        grid: tuple[int, int, int],
        shared_bytes: int = 0,
        **fields: Any,
    ) -> None:
        """Runs an entry point of source `name` with the given argument fields; the rest are 0."""
        source = self.sources[name]
        block = np.zeros(1, source.entries[entry])
        for field, value in fields.items():
            block[field] = value
        call = getattr(self._library, f"run_{entry}")
        sizes = (ctypes.c_uint * 3)(*grid)
        packed = ctypes.c_void_p(block.ctypes.data)
        counts = (ctypes.c_uint(n) for n in (source.threads, shared_bytes, self.seed))
        call(packed, sizes, *counts)

    def layout(self, name: str, struct: str) -> list[int]:
        """Size and field offsets of a struct, as the compiler sees them."""
        count = 1 + len(self.sources[name].structs[struct].names or ())
        found = (ctypes.c_ulong * count).in_dll(self._library, f"layout_{name}_{struct}")
        return list(found)
