"""Every kernel compiles for every architecture we name, with NVRTC, which needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcore.device.cuda.kernels import SOURCES, Source

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-python", exc_type=ImportError)

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CUPYS = ("-ftz=true", "--device-as-default-execution-space")
"""What CuPy adds to our options."""


def check(result):
    """What an NVRTC call returned, after its code."""
    code, *values = result
    assert int(code) == 0, code
    return values[0] if len(values) == 1 else values


def compile_for(source: Source, architecture: str) -> tuple[bytes, str]:
    """(binary, log) of a source; the log where it fails is in the error."""
    program = check(
        nvrtc.nvrtcCreateProgram(source.text().encode(), source.name.encode(), 0, [], [])
    )
    options = [*source.options(), *CUPYS, f"--gpu-architecture={architecture}"]
    options = [option.encode() for option in options]
    code = int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0])
    # NVRTC writes into the bytes: never into those of length 0 or 1, which Python shares.
    log = bytes(max(check(nvrtc.nvrtcGetProgramLogSize(program)), 2))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.rstrip(b"\0\n").decode()
    assert code == 0, text
    binary = bytes(max(check(nvrtc.nvrtcGetCUBINSize(program)), 2))
    check(nvrtc.nvrtcGetCUBIN(program, binary))
    check(nvrtc.nvrtcDestroyProgram(program))
    return binary, text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SOURCES)
def test_kernels_compile(name, architecture):
    source = SOURCES[name]
    binary, log = compile_for(source, architecture)
    assert log == ""
    assert binary.startswith(b"\x7fELF")
    for entry in source.entries:
        assert b"\0" + entry.encode() + b"\0" in binary, entry


@pytest.mark.parametrize("name", ["append", "gather", "copy_pages", "fill"])
def test_other_tunings_compile(name):
    for threads, vectors in ((256, 1), (512, 4), (64, 8)):
        source = replace(SOURCES[name], threads=threads, vectors=vectors, stream_stores=False)
        _, log = compile_for(source, "sm_90")
        assert log == ""


def test_errors_name_the_line():
    class Broken(Source):
        def text(self):
            return "extern int x;\nint y = no_such_name;\n"

    with pytest.raises(AssertionError, match=r'broken\(2\).*"no_such_name"'):
        compile_for(Broken("broken", {}, {}), "sm_90")
