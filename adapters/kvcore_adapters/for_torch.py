"""kvcore's pages as PyTorch tensors, and its operations inside `torch.compile` and CUDA graphs.

`tensor(lease)` is any lease as a tensor of its own type, in place::

    with manager.lease(0, "key") as lease:
        keys = tensor(lease)  # bfloat16, float8 and float4 included
        ...
        del keys

`TorchPools` holds every pool as a tensor for as long as an engine runs, and `TorchBatch` is a
`Batch` that takes and gives tensors::

    pools = TorchPools(manager)
    step = TorchBatch(pools, max_rows=64, max_tokens=64)
    step.prepare(caches)                      # outside of what is compiled or captured
    step.append(range(32), {"key": k, "value": v})
    keys, values = step.gather(0)
    attend(q, pools.pages(0, "key"), pools.pages(0, "value"), step.page_table())

Everything between two `prepare` calls may be compiled: the operations are custom operators
(`torch.ops.kvcore`) that tell the compiler which pools they write, so that whatever reads them
through `pools.pages` keeps its place. The compiler has to let them write in place, as Inductor
does. Where it gives them a copy of a pool instead, it gets a `StateError`: `aot_eager` always does,
Inductor where bare pages are returned that were read between two writes. Work runs on torch's
current stream. Operators carry no gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

import kvcore as k
from kvcore.checks import as_int
from kvcore.device import open_device
from kvcore.device.base import Device
from kvcore.errors import wrong, wrong_type
from kvcore_adapters.for_torch_pools import PAIRS, TorchPools, tensor, torch_type

__all__ = ["TorchBatch", "TorchPools", "tensor", "torch_type"]


class TorchBatch:
    """A `Batch` that takes and gives tensors, also inside `torch.compile` and captured graphs.

    Parameters
    ----------
    pools : TorchPools
        Of the manager whose caches it steps.
    max_rows, max_tokens : int
        As for `KVCacheManager.create_batch`.

    Attributes
    ----------
    batch : Batch
        For everything that is not here.
    """

    def __init__(self, pools: TorchPools, max_rows: int, max_tokens: int) -> None:
        self.pools = pools
        self.batch = pools.manager.create_batch(max_rows, max_tokens)
        self.num_rows = self.num_tokens = self.num_blocks = 0
        self._number = next(_numbers())  # never given twice: a graph may outlive its batch
        _batches()[self._number] = self

    def prepare(
        self,
        kv_caches: Iterable[k.KVCache],
        num_tokens: Any = 1,
        *,
        start: Any = None,
        stream: object = None,
    ) -> None:
        """`Batch.prepare`, on torch's current stream. Not for what is compiled or captured."""
        caches, on = list(kv_caches), self._stream() if stream is None else stream
        self.batch.prepare(caches, num_tokens, start=start, stream=on)
        self.num_rows, self.num_tokens = self.batch.num_rows, self.batch.num_tokens
        self.num_blocks = max((kv.num_blocks for kv in caches), default=0)

    def append(self, layers: int | Sequence[int], buffers: Mapping[str, Any]) -> None:
        """`Batch.append` on torch's current stream: `kvcore::append`."""
        many, roles = _many(layers), list(buffers)
        if not roles:
            raise wrong("buffers", "an array for at least one role", buffers)
        for role, values in buffers.items():
            if not isinstance(values, torch.Tensor):
                raise wrong_type(f"buffers[{role!r}]", "a tensor", values)
        pages, stacked = self.pools.of(many, roles), isinstance(layers, Sequence)
        append_(list(buffers.values()), pages, self._number, many, ROLES.join(roles), stacked)

    def gather(
        self, layers: int | Sequence[int], roles: Sequence[str] = ("key", "value")
    ) -> list[Any]:
        """`Batch.gather` into new tensors of the declared type: `kvcore::gather`."""
        many, roles = _many(layers), list(roles)
        if not roles:
            raise wrong("roles", "at least one", roles)
        pages, stacked = self.pools.of(many, roles), isinstance(layers, Sequence)
        found: list[Any] = gather(
            pages, self._number, many, ROLES.join(roles), stacked, self.num_tokens
        )
        return found

    def page_table(self, layer_group: int = 0, num_blocks: int | None = None) -> Any:
        """`Batch.page_table` as a new tensor: `kvcore::page_table`.

        `num_blocks` defaults to the longest sequence's, at the time of `prepare`.
        """
        blocks = self.num_blocks if num_blocks is None else num_blocks
        table = self.pools.table(layer_group)
        return page_table(table, self._number, layer_group, self.num_rows, blocks)

    def step_beams(self, parents: Any) -> None:
        """`KVCacheManager.step_beams`: `kvcore::step_beams`. The step is over."""
        step_beams(parents, self.pools.tables, list(self.pools.tensors.values()), self._number)

    def finish(self, parents: Any = None) -> None:
        """`Batch.finish` on torch's current stream."""
        self.batch.finish(parents, stream=self._stream())

    def _stream(self) -> Any:
        return _stream(self.pools.table(0))


# -- operators -------------------------------------------------------------------------------------

ROLES = "\n"  # between the names of roles: operators take no list of them


@cache
def _batches() -> WeakValueDictionary[int, TorchBatch]:
    """The batches that operators name by number."""
    return WeakValueDictionary()


@cache
def _numbers() -> Iterator[int]:
    """Of batches."""
    return count()


def _batch(number: int) -> TorchBatch:
    found = _batches().get(int(number))  # a symbol where the compiler saw several batches
    if found is None:
        raise wrong("batch", "the number of a TorchBatch that is alive", number)
    return found


@cache
def _device(name: str) -> Device:
    """Opened once: for `permute_dense`, which has no manager."""
    return open_device(name)


def _check_place(given: list[Any], own: Iterable[Any]) -> None:
    """Checks that an operator works on the memory of the pools, not on copies of the compiler's."""
    places = {its.data_ptr() for its in own}
    if not all(its.data_ptr() in places for its in given):
        raise k.StateError(
            "the compiler gave the operator a copy of a pool, which would be written back over "
            "what it writes; use a backend that works in place: torch.compile's default, Inductor"
        )


def _many(layers: int | Sequence[int]) -> list[int]:
    if not isinstance(layers, Sequence):
        return [as_int("layers", layers)]
    if not layers:
        raise wrong("layers", "at least one", layers)
    return list(layers)


def _layers(layers: list[int], stacked: bool) -> int | list[int]:
    return layers if stacked else layers[0]


def _stream(like: Any) -> Any:
    """The current stream of torch where tensors are on a GPU; None on the host."""
    return torch.cuda.current_stream(like.device) if like.is_cuda else None


@torch.library.custom_op("kvcore::append", mutates_args=("pages",))
def append_(
    values: list[torch.Tensor],
    pages: list[torch.Tensor],
    batch: int,
    layers: list[int],
    roles: str,
    stacked: bool,
) -> None:
    """Writes a step's new keys and values, `[L, N, H, D]` or `[N, H, D]`, into their pages."""
    its = _batch(batch)
    _check_place(pages, its.pools.tensors.values())
    buffers = dict(zip(roles.split(ROLES), values, strict=True))
    its.batch.append(_layers(layers, stacked), buffers, stream=_stream(values[0]))


@append_.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("kvcore::gather", mutates_args=())
def gather(
    pages: list[torch.Tensor],
    batch: int,
    layers: list[int],
    roles: str,
    stacked: bool,
    num_tokens: int,
) -> list[torch.Tensor]:
    """Reads a step's tokens out of their pages, `[L, N, H, D]` or `[N, H, D]` per role."""
    its = _batch(batch)
    _check_place(pages, its.pools.tensors.values())
    out: list[Any] = _empty(pages, batch, layers, roles, stacked, num_tokens)
    names = roles.split(ROLES)
    its.batch.gather(_layers(layers, stacked), names, out=out, stream=_stream(pages[0]))
    return out


@gather.register_fake
def _empty(
    pages: list[Any], batch: int, layers: list[int], roles: str, stacked: bool, num_tokens: int
) -> list[Any]:
    layout = _batch(batch).pools.manager.layout
    found = []
    for role in roles.split(ROLES):
        buffer = layout.place(layers[0], role).buffer
        if buffer.dtype is None or buffer.shape is None:
            raise wrong("roles", "typed buffers", role, "declare dtype and shape")
        shape = [len(layers)] * stacked + [num_tokens, *buffer.shape]
        if buffer.dtype == PAIRS:
            shape[-1] //= 2
        found.append(pages[0].new_empty(shape, dtype=torch_type(buffer.dtype)))
    return found


@torch.library.custom_op("kvcore::page_table", mutates_args=())
def page_table(
    table: torch.Tensor, batch: int, layer_group: int, num_rows: int, num_blocks: int
) -> torch.Tensor:
    """The slots of a step's rows, int32 `[num_rows, num_blocks]`."""
    its = _batch(batch)
    _check_place([table], its.pools.tables)
    out = table.new_empty(num_rows, num_blocks)
    its.batch.page_table(layer_group, num_blocks, out=out, stream=_stream(table))
    return out


@page_table.register_fake
def _(table: Any, batch: int, layer_group: int, num_rows: int, num_blocks: int) -> Any:
    return table.new_empty(num_rows, num_blocks)


@torch.library.custom_op("kvcore::step_beams", mutates_args=("tables", "pages"))
def step_beams(
    parents: torch.Tensor, tables: list[torch.Tensor], pages: list[torch.Tensor], batch: int
) -> None:
    """Lets every beam of a step go on from the parent that `parents` int32 `[num_rows]` names."""
    its = _batch(batch)
    _check_place(pages, its.pools.tensors.values())
    _check_place(tables, its.pools.tables)
    its.pools.manager.step_beams(its.batch, parents, stream=_stream(parents))


@step_beams.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("kvcore::permute_dense", mutates_args=("arrays",))
def permute_dense(arrays: list[torch.Tensor], parents: torch.Tensor, width: int) -> None:
    """`kvcore.permute_dense`: rows of contiguous caches follow their parents, in place."""
    device = _device(f"cuda:{parents.device.index}" if parents.is_cuda else "host")
    k.permute_dense(device, arrays, parents, width=width, stream=_stream(parents))


@permute_dense.register_fake
def _(*_: Any) -> None:
    return None
