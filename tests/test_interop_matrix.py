"""Framework x type x layout x direction x version: shared, cast on request, or refused."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from kvcore.dlpack.codes import UNKNOWN_TO_NUMPY
from kvcore.dlpack.exports import exports
from tests import interop_matrix as matrix
from tests.interop_matrix import CAST, LAYOUTS, NONE, REFUSED, SHARED, TYPES, VERSIONS

PAGE = Path(__file__).parents[1] / "docs" / "interop.md"
WIDE = {name for name in TYPES if name.endswith("64")}
GAPS = {"gaps between pages", "every other element", "transposed", "repeated (stride 0)"}
HALVES = {"0 axes", "every other element", "transposed", "repeated (stride 0)"}
"""Layouts that halves of bytes cannot have, or in which they would not lie in pairs."""


@pytest.fixture(autouse=True)
def nothing_stays_out():
    gc.collect()
    before = len(exports())
    yield
    gc.collect()
    assert len(exports()) == before


def expect_given(framework: str, dtype: str, name: str) -> set[str]:
    if dtype == "float4_e2m1fn" and name in HALVES - {"repeated (stride 0)"}:
        return {NONE}
    if name == "backwards":
        return {REFUSED}
    if framework == "jax":
        if dtype in WIDE or name in GAPS - {"transposed"}:  # it has other orders of axes
            return {REFUSED}
        return {CAST} if dtype == "float4_e2m1fn" else {SHARED}
    if framework == "numpy":
        return {CAST} if dtype in UNKNOWN_TO_NUMPY else {SHARED}
    return {SHARED}


@pytest.mark.parametrize("framework", matrix.FRAMEWORKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_given(framework, name):
    pytest.importorskip(framework)
    for dtype in TYPES:
        found = matrix.given(framework, dtype, LAYOUTS[name])
        assert found in expect_given(framework, dtype, name), dtype


@pytest.mark.parametrize("framework", matrix.FRAMEWORKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_taken(framework, name):
    pytest.importorskip(framework)
    for dtype in TYPES:
        found = matrix.foreign(framework, dtype, LAYOUTS[name])
        expected = NONE if found is None else SHARED
        assert matrix.taken(framework, dtype, LAYOUTS[name]) == expected, dtype


@pytest.mark.parametrize("framework", matrix.FRAMEWORKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_versions_that_a_consumer_asks_for(framework, version):
    pytest.importorskip(framework)
    new = version is not None and version >= (1, 0)
    structure = "dltensor_versioned" if new else "dltensor"
    for dtype in sorted(set(TYPES) - (WIDE if framework == "jax" else set())):
        found = matrix.given_raw(framework, dtype, version)
        unknown = dtype in UNKNOWN_TO_NUMPY and dtype != "bfloat16"
        if unknown and (version or (0, 8)) < (1, 1) and not (framework == "jax" and new):
            assert found == CAST, dtype
        elif framework == "jax" and new:  # it knows the old structure only, and says so
            assert "Error of jax" in found, dtype
        elif framework == "numpy" and dtype in UNKNOWN_TO_NUMPY:
            assert "Error of numpy" in found, dtype
        elif framework == "torch" and dtype == "float4_e2m1fn":
            assert found == "BufferError of torch", dtype  # it wants pairs as one element
        else:
            assert found == f"{SHARED}, {structure}", dtype


@pytest.mark.parametrize("framework", matrix.FRAMEWORKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_versions_of_a_producer(framework, version):
    pytest.importorskip(framework)
    for dtype in TYPES:
        found = matrix.taken_raw(framework, dtype, version)
        new = version is not None and version >= (1, 0) and framework != "jax"
        structure = "dltensor_versioned" if new else "dltensor"
        assert found in (NONE, f"{SHARED}, {structure}"), dtype


def test_the_page_shows_what_was_found():
    if matrix.missing():
        pytest.skip(f"needs {', '.join(matrix.missing())}")
    page = PAGE.read_text("utf-8")
    assert [table for table in matrix.tables().split("\n\n") if table not in page] == []
