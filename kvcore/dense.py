"""Beams of engines without paging: rows of dense caches follow their parents, in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcore.checks import as_int, as_items
from kvcore.errors import wrong_type

if TYPE_CHECKING:
    from kvcore.device.base import Device


def permute_dense(
    device: Device,
    arrays: Iterable[object],
    parents: object,
    *,
    width: int,
    starts: object = None,
    tokens: object = None,
    token_axis: int = 2,
    stream: object = None,
) -> None:
    """Makes every beam of contiguous caches continue what its parent was. Needs no manager.

    Row i of each request becomes what its row `parents[i]` was, in every array, for all layers in
    one launch. Nothing is allocated on a GPU and rows that stay are not touched. Returns at once;
    can be captured in a graph.

    Parameters
    ----------
    device : Device
        An open one, from `kvcore.device.open_device`. Not closed here.
    arrays : iterable of arrays
        `[rows, ...]` on the device, usually `[batch * beams, heads, tokens, dim]` for the keys and
        values of each layer: NumPy arrays on the host; on CUDA CuPy arrays or anything with the
        CUDA array interface or DLPack. Rows must be contiguous each; arrays must not overlap.
        Items may be of any kind.
    parents : array
        int32 `[rows]` on the device, beams counted within each request. Any number of rows may
        have the same parent. An entry that is no beam of the request means the row itself.
    width : int
        Rows of every request, or with `starts` the most that one has.
    starts : array, optional
        int32 `[requests + 1]` on the device: the rows where each request begins, and where the
        last one ends.
    tokens : array, optional
        int32 `[requests]` on the device: only so many tokens of each row move, the rest of a row
        stays as it is. Default: whole rows.
    token_axis : int, default 2
        The axis of the tokens, for `tokens`.
    stream : object, optional
        The stream to work on: whatever `device.stream` takes. Required on CUDA.

    Raises
    ------
    TypeError
        An array is not this device's, or `device` is none.
    ValueError
        Shapes, dtypes or strides do not fit; or there is no stream on CUDA.
    StateError
        The device has no memory ("meta").

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.device import open_device
    >>> keys = np.arange(8).reshape(4, 1, 2, 1)  # two requests of two beams, two tokens
    >>> parents = np.array([1, 1, 1, 0], np.int32)
    >>> permute_dense(open_device("host"), [keys], parents, width=2)
    >>> keys[:, 0, :, 0].tolist()
    [[2, 3], [2, 3], [6, 7], [4, 5]]
    """
    from kvcore.device.base import Device

    if not isinstance(device, Device):
        raise wrong_type("device", "an open Device", device, "see kvcore.device.open_device")
    some, axis = as_items("arrays", arrays, "an array"), as_int("token_axis", token_axis)
    width, on = as_int("width", width), device.stream(stream)
    device.permute_rows(
        [device.as_array(its, stream=on, writable=True, name="arrays") for its in some],
        device.as_array(parents, stream=on, name="parents"),
        width=width,
        starts=None if starts is None else device.as_array(starts, stream=on, name="starts"),
        tokens=None if tokens is None else device.as_array(tokens, stream=on, name="tokens"),
        token_axis=axis,
        stream=on,
    )
