"""Capsules by address: their names, and the structures in them."""

from __future__ import annotations

import ctypes
from ctypes import PYFUNCTYPE, c_int, c_void_p, py_object, pythonapi
from functools import cache
from typing import Any

from kvcore.dlpack.structs import (
    LEGACY,
    LEGACY_USED,
    VERSIONED,
    VERSIONED_USED,
    ManagedTensor,
    VersionedTensor,
)

Managed = ManagedTensor | VersionedTensor


class Api:
    """The interpreter's functions for capsules, with prototypes that nobody else can change."""

    def __init__(self) -> None:
        self.is_named = _function("PyCapsule_IsValid", c_int)
        self.pointer = _function("PyCapsule_GetPointer", c_void_p)
        self.rename = _function("PyCapsule_SetName", c_int)
        # A capsule keeps the address of its name, so names stay for as long as the process.
        self._texts = [ctypes.create_string_buffer(name) for name in (LEGACY_USED, VERSIONED_USED)]
        PYFUNCTYPE(None, py_object)(("Py_IncRef", pythonapi))(self._texts)
        self.used = dict(zip((LEGACY, VERSIONED), map(ctypes.addressof, self._texts), strict=True))

    def find(self, capsule: object) -> tuple[Managed, bytes] | None:
        """The structure of a capsule that nobody took over, and the capsule's name."""
        for name, kind in ((VERSIONED, VersionedTensor), (LEGACY, ManagedTensor)):
            if self.is_named(capsule, name):
                return kind.from_address(self.pointer(capsule, name)), name
        return None

    def take_over(self, capsule: object) -> Managed | None:
        """The structure of a capsule, whose deleter the caller now has to call. Only once."""
        found = self.find(capsule)
        if found is None:
            return None
        managed, name = found
        self.rename(capsule, self.used[name])
        return managed


def _function(name: str, result: Any) -> Any:
    return PYFUNCTYPE(result, py_object, c_void_p)((name, pythonapi))


@cache
def api() -> Api:
    """The one `Api` of the process."""
    return Api()
