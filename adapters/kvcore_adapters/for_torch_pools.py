"""Leases as tensors, and every pool of a manager as one. Import these names from `for_torch`."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

import kvcore as k
from kvcore.dlpack.exporter import check_lease
from kvcore.errors import wrong, wrong_type
from kvcore.page_views import block_shape

LEGACY = 1
PAIRS = "float4_e2m1fn"
KNOWN = (1, 3)  # of DLPack, to torch's importer


def torch_type(name: str) -> Any:
    """The torch type of a declared one; pairs of `float4_e2m1fn` are one element in torch."""
    return getattr(torch, "float4_e2m1fn_x2" if name == PAIRS else name)


def tensor(lease: k.Lease) -> Any:
    """A lease as a tensor of the same memory.

    Parameters
    ----------
    lease : Lease
        Of any type. float4 is packed: its last axis has half the length, of type
        `torch.float4_e2m1fn_x2`.

    Returns
    -------
    torch.Tensor
        On CUDA, torch's current stream comes after what kvcore has enqueued until now. torch has no
        read-only tensors: don't write where the lease is read-only.
    """
    check_lease(lease)
    kind, index = lease.__dlpack_device__()
    stream = None
    if kind == torch.utils.dlpack.DLDeviceType.kDLCUDA:
        stream = torch.cuda.current_stream(index).cuda_stream or LEGACY
    pairs = lease.dtype == PAIRS
    given = lease.bits() if pairs else lease
    found = torch.from_dlpack(given.__dlpack__(stream=stream, max_version=KNOWN))
    return found.view(torch_type(PAIRS)) if pairs else found


class _Where(NamedTuple):
    """Where a buffer lies."""

    key: tuple[int, int]  # layer group and pool
    slot_bytes: int
    start: int  # bytes within a slot
    end: int
    dtype: Any
    shape: tuple[int, ...] | None  # of a block; None: opaque


def _where(manager: k.KVCacheManager, layer: int, role: str) -> _Where:
    layout = manager.layout
    place = layout.place(layer, role)
    shape: tuple[int, ...] | None = block_shape(place, layout.tokens_per_block)
    dtype = torch.uint8
    if place.buffer.dtype is None or shape is None:
        shape = None
    else:
        dtype = torch_type(place.buffer.dtype)
        if place.buffer.dtype == PAIRS:
            shape = (*shape[:-1], shape[-1] // 2)
    return _Where(
        (int(place.layer_group), place.pool),
        layout.pool_groups[place.pool_group].slot_bytes[place.pool],
        place.offset,
        place.offset + place.stored_bytes,
        dtype,
        shape,
    )


class TorchPools:
    """The pools and page tables of a manager as tensors, leased until `close`. A context manager.

    Parameters
    ----------
    manager : KVCacheManager
        With memory.

    Attributes
    ----------
    manager : KVCacheManager
    tensors : dict of (layer group, pool) to torch.Tensor
        Whole pools: `[page indices, ...]`, indexed by PER_LAYER page indices, or uint8 `[slots,
        bytes]` where buffers differ in type or shape.
    tables : list of torch.Tensor
        int32 `[rows, blocks]` by layer group, current after `prepare`; not to be written.
    """

    def __init__(self, manager: k.KVCacheManager) -> None:
        if not isinstance(manager, k.KVCacheManager):
            raise wrong_type("manager", "a KVCacheManager", manager)
        self.manager = manager
        # Plain numbers by buffer: the compiler reads them.
        self._where = {
            (int(layer), role): _where(manager, layer, role)
            for layer, role in manager.layout.places
        }
        self._leases: list[k.Lease] = []
        self.tensors: dict[tuple[int, int], Any] = {}
        self.tables: list[Any] = []
        try:
            for where in self._where.values():
                if where.key not in self.tensors:
                    lease = manager.lease(layer_group=where.key[0], pool=where.key[1])
                    self.tensors[where.key] = self._leased(lease)
            for group in range(len(manager.layout.layer_groups)):
                self.tables.append(self._leased(manager.lease_page_table(group)))
        except BaseException:
            self.close()
            raise

    def _leased(self, lease: k.Lease) -> Any:
        self._leases.append(lease)
        return tensor(lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except k.LeaseInUse:
            if kind is None:
                raise

    def pages(self, layer: int, role: str) -> Any:
        """The pages of a buffer, as `KVCacheManager.lease` shows them, as a view of their pool."""
        where = self._of(layer, role)
        slots = self._slots(where.key, where.slot_bytes)
        part = slots[:, where.start : where.end]
        return part if where.shape is None else part.view(where.dtype).unflatten(1, where.shape)

    def copy_pages(self, layer_group: int, sources: Any, targets: Any) -> None:
        """Copies slots with all their buffers: `sources[i]` over `targets[i]`.

        Parameters
        ----------
        layer_group : int
        sources, targets : torch.Tensor of int32 or int64 [n]
            Slots, as `page_table` has them, on the pools' device; no target twice. Not checked:
            they are read on the device, so that a captured graph can have others each time.

        Notes
        -----
        For pages that the caller may write: those of blocks behind the history, which no other
        cache shares. Plain tensor code on torch's current stream, two kernels a pool and room for
        n slots in between; it compiles, in place, and can be captured. Belongs between `prepare`
        and `finish` of a step over the caches whose pages these are.
        """
        slot_bytes = {where.key: where.slot_bytes for where in self._where.values()}
        found = [key for key in slot_bytes if key[0] == layer_group]
        if not found:
            raise wrong("layer_group", f"one of {sorted({g for g, _ in slot_bytes})}", layer_group)
        for key in found:
            slots = self._slots(key, slot_bytes[key])
            slots[targets] = slots[sources]

    def table(self, layer_group: int) -> Any:
        """One of `tables`, checked."""
        self._refuse_closed()
        if not 0 <= layer_group < len(self.tables):
            raise wrong("layer_group", f"a number below {len(self.tables)}", layer_group)
        return self.tables[layer_group]

    def _refuse_closed(self) -> None:
        if not self.tables:  # there is one for each layer group
            raise k.StateError("these pools were closed; make new ones")

    def _slots(self, key: tuple[int, int], slot_bytes: int) -> Any:
        """A pool as uint8 `[slots, bytes]`."""
        self._refuse_closed()
        return self.tensors[key].view(torch.uint8).view(-1, slot_bytes)

    def of(self, layers: Iterable[int], roles: Iterable[str]) -> list[Any]:
        """The pools that hold these buffers, each once."""
        self._refuse_closed()
        keys = [self._of(layer, role).key for layer in layers for role in roles]
        return [self.tensors[key] for key in dict.fromkeys(keys)]

    def _of(self, layer: int, role: str) -> _Where:
        found = self._where.get((layer, role))
        if found is None:
            raise wrong("layer, role", f"one of {list(self._where)}", (layer, role))
        return found

    def close(self) -> None:
        """Lets go of all tensors and ends the leases. Idempotent.

        Raises `LeaseInUse` while somebody else holds a tensor of a pool; the memory stays mapped
        until that is dropped. After any other error it can be called again.
        """
        self.tensors.clear()
        self.tables.clear()
        busy = []
        while self._leases:
            try:
                self._leases[0].close()
            except k.LeaseInUse as error:
                busy.append(error)
            del self._leases[0]
        if busy:
            raise busy[0]
