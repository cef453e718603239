"""Kernel addressing of layers and roles, made once and kept."""

from __future__ import annotations

from kvcore.checks import as_tuple
from kvcore.device.base import Device, Memory, PageStack
from kvcore.errors import wrong
from kvcore.layout import Layout, page_geometry

Key = tuple[tuple[int, ...], tuple[str, ...]]


class PageStacks:
    """The `PageStack` of every combination of layers and roles that was asked for."""

    def __init__(
        self, layout: Layout, device: Device, pool_places: list[list[tuple[Memory, int]]]
    ) -> None:
        self._layout, self._device, self._pool_places = layout, device, pool_places
        self._made: dict[Key, tuple[PageStack, int]] = {}

    def get(self, layers: tuple[int, ...], roles: tuple[str, ...]) -> tuple[PageStack, int]:
        """A stack and its layer group. O(1) but for the first time.

        Raises `ValueError` for buffers that are unknown, opaque or there twice, or differ in group
        or geometry, `TypeError` for roles that are no text.
        """
        try:
            found = self._made.get((layers, roles))
        except TypeError:  # not hashable: looking for the buffers says what is wrong
            found = None
        if found is None:
            found = self._made[layers, roles] = self._make(layers, roles)
        return found

    def _make(self, layers: tuple[int, ...], roles: tuple[str, ...]) -> tuple[PageStack, int]:
        if not layers or not roles:
            raise wrong("layers, roles", "at least one of each", (layers, roles))
        roles = as_tuple("roles", roles, str, "a role")
        places = [self._layout.place(layer, role) for layer in layers for role in roles]
        if len(set(layers)) < len(layers) or len(set(roles)) < len(roles):
            raise wrong("layers, roles", "each of them once", (layers, roles))
        shapes = {page_geometry(place, self._layout.tokens_per_block) for place in places}
        groups = {place.layer_group for place in places}
        if len(shapes) > 1 or len(groups) > 1:
            raise wrong(
                "layers, roles",
                "buffers of one layer group with equal dtype, shape and layout",
                (layers, roles),
                "use one call for each kind",
            )
        memory = [
            (*self._pool_places[place.pool_group][place.pool], place.offset) for place in places
        ]
        return self._device.page_stack(memory, len(roles), shapes.pop()), groups.pop()
