"""Page stacks: tokens into pages, out of them, and the test pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import cupy

from kvcore.device.base import Array, PageGeometry, Stream
from kvcore.device.checks import ANY, INT32, INT64, check_array, check_tokens
from kvcore.device.cuda import kernels
from kvcore.device.cuda.arguments import MAX_ROLES, MAX_UNITS
from kvcore.device.cuda.kernels import divider
from kvcore.device.cuda.launch import Launch
from kvcore.device.cuda.layouts import Strides, TokenCut, cut_page, cut_token, page_bits
from kvcore.device.cuda.memory import CudaMemory
from kvcore.device.cuda.places import PlaceTable
from kvcore.device.cuda.seen import Seen
from kvcore.errors import wrong
from kvcore.ids import div_ceil

if TYPE_CHECKING:
    from kvcore.device.cuda.device import CudaDevice

HEAD: Final = f"<Q{MAX_ROLES}Q{MAX_ROLES}qI"
"""What every append or gather packs: mapping, bases, layer strides, units."""

NONE: Final = [0] * MAX_ROLES
MAX_PLANS: Final = 256
WORD: Final = 4  # bytes of a fingerprint's word


class TokenPlan:
    """A launch for arrays of certain strides and alignment."""

    __slots__ = ("chunk", "cut", "launch", "token_units")

    def __init__(self, cut: TokenCut, launch: Launch, chunk: int) -> None:
        self.cut, self.launch, self.chunk = cut, launch, chunk
        self.token_units = cut.token_units


class TokenStack:
    """The pages of `L` layers and `K` roles, with their addresses in device memory."""

    def __init__(
        self,
        device: CudaDevice,
        places: Sequence[tuple[CudaMemory, int, int]],
        num_roles: int,
        geometry: PageGeometry,
    ) -> None:
        self.geometry, self.num_roles = geometry, num_roles
        self.num_layers = len(places) // num_roles
        self._device = device
        self._row, self._itemsize = (geometry.heads, geometry.dim), geometry.itemsize
        self._mappings = device.mappings
        self._slot_tokens = geometry.expansion * geometry.page_tokens
        self._bits = page_bits(geometry, [(m.base + offset, size) for m, size, offset in places])
        self._plans: dict[Any, TokenPlan] = {}
        self._bound = Seen()  # launches for arrays that came before
        self._last = Seen()  # the arrays of the call before
        self._table = PlaceTable(device, places)

    @property
    def device(self) -> CudaDevice:
        """Who made it."""
        return self._device

    def forget_plans(self) -> None:
        """Makes the next launches anew, with the tunings of then."""
        self._plans.clear()
        self._bound, self._last = Seen(), Seen()

    def move(
        self, source: str, name: str, mapping: Array, arrays: Sequence[Array], stream: Stream
    ) -> None:
        """Append or gather (`source`); `name` is what messages call `arrays`.

        From the third call on with the very same arrays the launch is bound to them.
        """
        key = source, id(mapping), *map(id, arrays)
        bound = self._bound.get(key, mapping, *arrays)
        if bound is not None and self._table.num_slots:
            bound(stream)
            return
        tokens, pointer = self._tokens(mapping)
        shape, itemsize = (self.num_layers, tokens, *self._row), self._itemsize
        right = len(arrays) == self.num_roles
        for array in arrays:
            if (
                array.__class__ is not cupy.ndarray
                or array.shape != shape
                or array.itemsize != itemsize
                or array.data.device_id != self._device.index
            ):
                right = False
        if not right:  # or a subclass of CuPy's array
            check_tokens(name, arrays, cupy.ndarray, self, tokens)
            self._check_device(name, arrays)
        if tokens and len(arrays) <= MAX_ROLES:
            sent = self._move(source, pointer, tokens, 0, arrays, stream)
            if sent is not None and self._last.get(key, mapping, *arrays):
                launch, *values = sent
                self._bound.keep(key, launch.fixed(*values), mapping, *arrays)
            self._last = Seen()
            self._last.keep(key, True, mapping, *arrays)
        elif tokens:
            for first in range(0, len(arrays), MAX_ROLES):
                some = arrays[first : first + MAX_ROLES]
                self._move(source, pointer, tokens, first, some, stream)

    def _check_device(self, name: str, arrays: Sequence[Array]) -> None:
        here = self._device.index
        for array in arrays:
            if array.data.device_id != here:
                there = f"one of cuda:{array.data.device_id}"
                raise wrong(name, f"arrays of cuda:{here}", there, "copy it there first")

    def _move(
        self,
        source: str,
        mapping: int,
        tokens: int,
        first: int,
        arrays: Sequence[Array],
        stream: Stream,
    ) -> tuple[Launch, *tuple[int, ...]] | None:
        """One launch, for at most `MAX_ROLES` roles from `first` on; its grid and what it packed.

        None if it took several.
        """
        bits, layers, roles = 0, self.num_layers, len(arrays)
        bases, steps, strides = [], [], []
        for array in arrays:
            base, its = array.data.ptr, array.strides
            bits |= base | its[0]
            bases.append(base)
            steps.append(its[0])
            strides.append(its[1:])
        if layers == 1:  # the stride of an axis of length 1 says nothing
            bits, steps = 0, [0] * roles
            for base in bases:
                bits |= base
        if roles < MAX_ROLES:
            bases += NONE[roles:]
            steps += NONE[roles:]
        key = source, first, bits & 15, *strides
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, source, first, strides, bits)
        units = tokens * plan.token_units
        if units > MAX_UNITS:
            step = MAX_UNITS // plan.token_units
            for start in range(0, tokens, step):
                part = [array[:, start : start + step] for array in arrays]
                count = min(step, tokens - start)
                self._move(source, mapping + 8 * start, count, first, part, stream)
            return None
        blocks = -(-units // plan.chunk)
        values = blocks, roles, layers, mapping, *bases, *steps, units
        plan.launch(stream, *values)
        return plan.launch, *values

    def move_within(self, src: Array, dst: Array, stream: Stream) -> None:
        """`move_tokens`."""
        tokens, source = self._tokens(src, "src")
        check_array("dst", dst, cupy.ndarray, INT32, (tokens, 2))
        cut = cut_page(self.geometry, self._bits)
        launch = self._device.launch("move_tokens", f"move_tokens_{cut.unit}")
        chunk = self._device.source("move_tokens").chunk
        cuts = *divider(cut.token_units), *divider(cut.head_units), 0
        step = max(MAX_UNITS // cut.token_units, 1)
        for start in range(0, tokens, step):
            units = min(step, tokens - start) * cut.token_units
            pointers = source + 8 * start, dst.data.ptr + 8 * start
            for first in range(0, self.num_roles, MAX_ROLES):
                roles = min(MAX_ROLES, self.num_roles - first)
                grid = div_ceil(units, chunk), roles, self.num_layers
                launch(stream, *grid, *pointers, units, *cuts, *self._pages(first))

    def write_fingerprints(self, mapping: Array, keys: Array, stream: Stream) -> None:
        """The pattern into every token."""
        self._fingerprint("write_fingerprints", mapping, keys, 0, stream)

    def verify_fingerprints(self, mapping: Array, keys: Array, bad: Array, stream: Stream) -> None:
        """Counts wrong words into `bad`."""
        tokens, _ = self._tokens(mapping)
        check_array("bad", bad, cupy.ndarray, INT32, (tokens,))
        check_array("keys", keys, cupy.ndarray, INT64, (tokens,))
        self._device.fill_words(bad, 0, stream=stream)
        self._fingerprint("verify_fingerprints", mapping, keys, bad.data.ptr, stream)

    def _fingerprint(
        self, entry: str, mapping: Array, keys: Array, bad: int, stream: Stream
    ) -> None:
        (tokens, place), g = self._tokens(mapping), self.geometry
        check_array("keys", keys, cupy.ndarray, INT64, (tokens,))
        size = g.heads * g.dim * g.itemsize
        words = div_ceil(size, WORD)
        step = max(MAX_UNITS // words, 1)
        launch, source = self._device.launch("fingerprint", entry), kernels.SOURCES["fingerprint"]
        cuts = *divider(words), *divider(g.dim * g.itemsize)
        for start in range(0, tokens, step):
            count = min(step, tokens - start) * words
            offset = 4 * start if bad else 0
            pointers = place + 8 * start, keys.data.ptr + 8 * start, bad + offset
            grid = div_ceil(count, source.threads), self.num_roles, self.num_layers
            launch(stream, *grid, *self._pages(0), *pointers, count, size, *cuts)

    def _tokens(self, mapping: Array, name: str = "mapping") -> tuple[int, int]:
        """Length and address of a mapping, after a look at it."""
        self._table.check_open("stack")
        found: tuple[int, int] | None = self._mappings.get(id(mapping), mapping)
        if found is None:
            check_array(name, mapping, cupy.ndarray, INT32, (ANY, 2))
            facts = int(mapping.shape[0]), int(mapping.data.ptr)
            found = self._mappings.keep(id(mapping), facts, mapping)
        return found

    def _pages(self, first_role: int) -> tuple[int, ...]:
        """The fields of `Pages`."""
        g = self.geometry
        strides = g.page_bytes, g.token_stride, g.head_stride
        counts = self._slot_tokens, self.num_roles, first_role
        return self._table.address, *strides, *divider(g.page_tokens), *counts

    def _plan(
        self, key: Any, name: str, first: int, strides: Sequence[Strides], bits: int
    ) -> TokenPlan:
        """Chooses the kernel for a new combination of strides, and fills its constants in."""
        source = self._device.source(name)
        cut = cut_token(self.geometry, self._bits, strides, bits)
        launch = self._device.new_launch(source, f"{name}{cut.suffix}", HEAD)
        fields = launch.block
        table, *steps = self._pages(first)
        fields["pages"] = table, *steps[:3], tuple(steps[3:6]), *steps[6:]
        for i, axis in enumerate(("token", "head", "item")):
            fields[axis][0, : len(strides)] = [its[i] for its in strides]
        fields["token_units"] = divider(cut.token_units)
        fields["head_units"] = divider(cut.head_units)
        fields["item_units"] = divider(cut.item_units)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        plan = self._plans[key] = TokenPlan(cut, launch, source.chunk)
        return plan
