"""Which pages of a cache nobody else reads: these may be written, and may be spoiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcore.ids import div_ceil
from kvcore.testing.launches import ContentError

if TYPE_CHECKING:
    from kvcore.kv_cache import KVCache


def need_own(kv: KVCache, first: int, count: int) -> None:
    """Refuses to write `count` positions from `first` on where somebody else may read."""
    if not count:
        return
    if first < kv.num_committed_tokens:
        raise ContentError(f"{kv!r} position {first}: it is committed")
    control = kv._runtime.control
    size = control.seqs.shape.tokens_per_block
    blocks = range(first // size, div_ceil(first + count, size))
    for beam in range(kv.beam_width):
        for group, table in enumerate(control.slots_of):
            row = kv.get_base_page_indices(group, beam).tolist()
            for ordinal, slot in list(enumerate(row))[blocks.start : blocks.stop]:
                if slot >= 0 and (table.refs[slot] > 1 or table.in_tree[slot]):
                    raise ContentError(
                        f"{kv!r} beam {beam} block {ordinal}: the page in slot {slot} is "
                        "published or has other holders, so it must not be written"
                    )


def sole_pages(kv: KVCache, pages: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of a cache's pages (layer group, slot) that nobody else holds and nobody can find."""
    if not pages:
        return set()
    control = kv._runtime.control
    rows = control.seqs.page_rows(kv._sequence)
    sole = set()
    for group, slot in pages:
        table = control.slots_of[group]
        mates = [g for g, other in enumerate(control.slots_of) if other is table]
        own = np.count_nonzero(rows[:, mates] == slot)
        if own == table.refs[slot] and not table.in_tree[slot]:
            sole.add((group, slot))
    return sole
