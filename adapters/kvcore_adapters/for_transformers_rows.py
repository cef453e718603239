"""The rows of a torch batch whose keys and values lie in kvcore pages. Knows no transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import kvcore as k
from kvcore.checks import as_int
from kvcore.errors import wrong

ROLES = "key", "value"
ROUNDING = 16
"""Keys of equal tokens may be so many units of rounding apart, relative to their length: matrix
kernels treat the rows at the edge of a tile differently."""

# Rotary positions of equal rows are equal. But torch's CPU library chooses among its kernels at the
# first call of a function, and where several threads make it, one may take the coarsest: its rows
# are 1e-4 off, once (https://github.com/pytorch/pytorch/issues/188792). So one thread calls first.
for _function in (torch.cos, torch.sin):
    _function(torch.ones(1, dtype=torch.float32, device="cpu"))


class PagedRows:
    """Rows of a batch, `group` equal ones at a time in one sequence, in pages of one manager.

    While the rows of each group are equal, a group is one sequence of one beam, written once. From
    the first step on whose keys differ within a group, every sequence has one beam per row.

    Parameters
    ----------
    manager : KVCacheManager
        Layers 0 to `num_layers - 1` with buffers "key" and "value" of shape (heads, dim).
    num_layers : int
    group : int
        Neighbouring rows that start out equal.
    scope : ReuseScope, optional
        What is published belongs to it.
    written_once : bool
        Whether the first step is the only one and rows stay equal: cross-attention.
    """

    def __init__(
        self,
        manager: k.KVCacheManager,
        num_layers: int,
        group: int,
        scope: k.ReuseScope | None = None,
        *,
        written_once: bool = False,
    ) -> None:
        self.manager, self.num_layers = manager, num_layers
        self.group = as_int("num_beams", group, 1)
        self.scope, self.written_once = scope, written_once
        self.expected = 0  # rows of the batch, where another cache knows them already
        self.sequences: list[k.KVCache] = []
        self._writes, self._reads = _Steps(manager), _Steps(manager)
        self._forget()

    def _forget(self) -> None:
        self.lengths = [0] * self.num_layers  # tokens of each layer
        self.start = self.end = 0  # of the present step
        self.apart = False  # whether each row has its own beam
        self.mapped = False  # whether the reading batch knows the present pages
        self.like: Any = None  # an empty tensor of the type and device of the last ones

    @property
    def width(self) -> int:
        """Beams of each sequence."""
        return self.group if self.apart else 1

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first step."""
        return len(self.sequences) * self.group

    # -- a step ------------------------------------------------------------------------------------

    def update(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Writes `[rows, heads, new, dim]` of one layer; all its keys and values so far.

        The first layer to come begins a step: it widens and grows all sequences, or raises with
        lengths, beams and pages as they were.
        """
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise NotImplementedError("pages carry no gradients; call the model under no_grad()")
        for role, states in zip(ROLES, (keys, values), strict=True):
            self._check_states(layer, role, states, keys)
        self.like = keys.new_empty(0)
        new = keys.shape[2]
        if self.lengths[layer] == self.end:
            self._begin(keys, new)
        elif new != self.end - self.start or len(keys) != self.num_rows:
            expected = f"{self.num_rows} rows of {self.end - self.start} tokens, as in this step"
            raise wrong(f"layer {layer}: key_states", expected, list(keys.shape))
        states = {"key": bits(self._packed(keys)), "value": bits(self._packed(values))}
        self._writes.batch.append(layer, states, stream=self._stream())
        self.lengths[layer] = self.end
        held_keys, held_values = self.read(layer)
        return held_keys, held_values

    def _begin(self, keys: Any, new: int) -> None:
        self._check_whole("update")
        if self.written_once and self.end:
            raise k.StateError("cross-attention is written once; reset() the cache before")
        self._check_batch(keys)
        opened = not self.sequences
        if opened:
            self._open(len(keys) // self.group)
        try:
            self._grow(new, widen=self._must_part(keys))
        except BaseException:
            if opened:
                self.reset()
            raise
        self.start, self.end, self.mapped = self.end, self.end + new, False

    def _check_whole(self, call: str) -> None:
        if min(self.lengths) < self.end:
            layer = self.lengths.index(min(self.lengths))
            raise k.StateError(f"{call}: the last forward did not reach layer {layer}; reset() the "
                               "cache")  # fmt: skip

    def _check_batch(self, keys: Any) -> None:
        if len(keys) % self.group:
            expected = f"a multiple of num_beams={self.group} rows"
            raise wrong("key_states", expected, len(keys), "give the cache generate's num_beams")
        known, why = (self.num_rows, "before") if self.sequences else (self.expected, "were found")
        if known and len(keys) != known:
            expected = f"{known} rows, as {why}"
            raise wrong("key_states", expected, len(keys), "reset() the cache for another batch")

    def _open(self, groups: int, prompts: Sequence[Sequence[int]] | None = None) -> None:
        """One active sequence per group, with what is known of its prompt; all or none."""
        made: list[k.KVCache] = []
        try:
            for group in range(groups):
                prompt = None if prompts is None else prompts[group]
                made.append(self.manager.create_kv_cache(self.scope, prompt))
                if not made[-1].resume(self._stream()):
                    raise k.OutOfPagesError("no room: other sequences hold the manager's pages")
        except BaseException:
            self.manager.close_kv_caches(made)
            raise
        self.sequences = made

    def _must_part(self, keys: Any) -> bool:
        """Whether rows of a group go apart now; raises `ValueError` where they never were equal.

        The keys of the first layer to come depend on a row's tokens and positions alone, and those
        of equal rows are equal to the last bit or, for rounding, nearly.
        """
        if self.apart or self.group == 1:
            return False
        rows = keys.detach().unflatten(0, (-1, self.group))
        if torch.equal(rows[:, 1:], rows[:, :-1]):
            return False
        if self.end and not self.written_once:
            return True
        first = rows[:, :1].float()
        distance = (rows.float() - first).norm(dim=(2, 4))  # [groups, group, new]
        limit = ROUNDING * torch.finfo(keys.dtype).eps * first.norm(dim=(2, 4))
        far = (distance > limit).any(2).nonzero().tolist()
        if far:
            first_row = far[0][0] * self.group
            raise wrong(
                f"key_states: row {first_row + far[0][1]}",
                f"the prompt of row {first_row}, repeated num_beams={self.group} times",
                "another",
                "give the cache generate's num_beams, or its num_return_sequences if larger",
            )
        return False

    def _grow(self, new: int, *, widen: bool) -> None:
        """Pages for `new` more tokens of every row, after widening, mapped; all or nothing."""
        done, grown, before = [], False, self.apart
        try:
            if widen:
                self._finalise()
                for kv in self.sequences:
                    kv.beam_width = self.group
                    done.append(kv)
            if not self.manager.advance(self.sequences, new):
                rows = len(self.sequences) * (self.group if widen else self.width)
                missing = self.manager.missing_pages(self.sequences, new)
                raise k.OutOfPagesError(
                    f"no pages for {new} more tokens of {rows} rows at {self.end}: {missing} "
                    "missing; give the cache more max_tokens",
                    missing,
                )
            grown, self.apart = True, before or widen
            self._writes.prepare(self.sequences, self.width, new, self.end, self._stream())
        except BaseException:
            self.apart, self.mapped = before, False
            if grown:
                self.manager.truncate(self.sequences, self.end)
            for kv in done:
                kv.set_beam_width(1)
            raise

    def _finalise(self) -> None:
        """Makes everything written history, so that beams share it by reference."""
        self.manager.advance(self.sequences, 0, history=self.end)

    # -- operands ----------------------------------------------------------------------------------

    def _packed(self, states: Any) -> Any:
        """`[rows, heads, new, dim]` as `[tokens, heads, dim]`, one row of each beam."""
        rows = states.detach()[:: self.group // self.width]
        return rows.transpose(1, 2).flatten(0, 1)

    def _stream(self) -> Any:
        """Torch's own stream; None, the device's default, where torch has none."""
        if self.manager.device.kind != "cuda":
            return None
        device = None if self.like is None else self.like.device
        return torch.cuda.current_stream(device)

    def read(self, layer: int, roles: Sequence[str] = ROLES) -> tuple[Any, ...]:
        """Dense `[rows, heads, length, dim]` of one layer; reads every page anew."""
        rows, length = len(self.sequences) * self.width, self.lengths[layer]
        on = self._stream()
        if not self.mapped:  # one mapping for all layers of a step
            self._reads.prepare(self.sequences, self.width, self.end, 0, on)
            self.mapped = True
        shapes = [self._buffer(layer, role).shape or () for role in roles]
        out = [self.like.new_empty((rows * self.end, *shape)) for shape in shapes]
        self._reads.batch.gather(layer, roles, out=[bits(dense) for dense in out], stream=on)
        if on is None:
            self.manager.device.synchronize()  # torch computes at once, a deferred device later
        dense = [each.unflatten(0, (rows, self.end)).transpose(1, 2) for each in out]
        if self.width < self.group:
            dense = [each.repeat_interleave(self.group, 0) for each in dense]
        return tuple(each[:, :, :length] for each in dense)

    def _buffer(self, layer: int, role: str) -> k.BufferConfig:
        return self.manager.config.layers[layer].buffers[ROLES.index(role)]

    def _check_states(self, layer: int, role: str, states: Any, keys: Any) -> None:
        name, given = f"layer {layer}: {role}_states", list(states.shape)
        if len(given) != 4:
            raise wrong(name, "[rows, heads, new, dim]", given)
        if (given[0], given[2]) != (len(keys), keys.shape[2]):
            raise wrong(name, f"rows and tokens as key_states {list(keys.shape)}", given)
        device, place = self.manager.device, "cpu"
        if device.kind == "cuda":
            place = f"cuda:{getattr(device, 'index', 0)}"
        if str(states.device) != place:
            expected = f"tensors on {place}, where the pages lie"
            raise wrong(name, expected, str(states.device), "give the cache the model's device")
        buffer = self._buffer(layer, role)
        found = str(states.dtype).removeprefix("torch."), (states.shape[1], states.shape[3])
        if found != (buffer.dtype, buffer.shape):
            raise wrong(
                name,
                f"what the pages hold of a token, {buffer.dtype} {buffer.shape}",
                f"{found[0]} {found[1]}",
                "give the cache the model's dtype, or a manager with its shapes",
            )

    # -- between steps -----------------------------------------------------------------------------

    def reorder(self, parents: Sequence[int]) -> None:
        """Makes row i continue row `parents[i]`, which has to be of the same group."""
        if not self.sequences:
            return
        if len(parents) != self.num_rows:
            raise wrong("beam_idx", f"{self.num_rows} rows", len(parents))
        for row, parent in enumerate(parents):
            if parent // self.group != row // self.group:
                raise wrong(
                    f"beam_idx[{row}]",
                    f"a row of its group of num_beams={self.group}",
                    parent,
                    "give the cache generate's num_beams",
                )
        self._check_whole("reorder_cache")
        if not self.apart:
            return  # the rows of a group are still equal
        self._finalise()
        self.mapped = False
        for i, kv in enumerate(self.sequences):
            first = i * self.group
            kv.reorder_beams([row - first for row in parents[first : first + self.group]])

    def crop(self, tokens: int) -> None:
        """Forgets the last `tokens` tokens of every row."""
        if not tokens or not self.sequences:
            return
        self._check_whole("crop")
        left, final = self.end - tokens, max(kv.history_length for kv in self.sequences)
        if left < final:
            raise NotImplementedError(
                f"crop to {left} tokens: {final} are final, because beams or other sequences share "
                "them; crop what was written since, or reset() the cache"
            )
        self.manager.truncate(self.sequences, left)
        self.lengths = [left] * self.num_layers
        self.start = self.end = left
        self.mapped = False

    def adopt(self, prompts: Sequence[Sequence[int]], like: Any) -> None:
        """Starts with what is known of the prompts, as long as the shortest match; else empty.

        What is written once starts with all of it or empty. `like` is a tensor on the device of
        what comes.
        """
        known = min(self.manager.probe_reuse(self.scope, prompt) for prompt in prompts)
        if known < (len(prompts[0]) if self.written_once else 1):
            return
        self.like = like
        self._open(len(prompts), [prompt[:known] for prompt in prompts])
        if min(kv.history_length for kv in self.sequences) < known:  # evicted meanwhile
            self.reset()
            return
        self.lengths = [known] * self.num_layers
        self.start = self.end = known

    def publish(self, group: int, prompt: Sequence[int]) -> None:
        """Lets others find the full pages of a group's first tokens; all that is written once."""
        kv, block = self.sequences[group], self.manager.config.tokens_per_block
        whole, full = self.written_once, len(prompt) // block * block  # beams differ in the rest
        kv.commit(prompt[kv.num_committed_tokens : None if whole else full], is_end=whole)
        self.mapped = False

    def reset(self) -> None:
        """Frees all pages."""
        if self.sequences:
            self.manager.close_kv_caches(self.sequences)
        self.sequences = []
        self._forget()


class _Steps:
    """A batch of kvcore that is made anew where a step needs a larger one."""

    def __init__(self, manager: k.KVCacheManager) -> None:
        self._manager = manager
        self._batch: k.Batch | None = None

    @property
    def batch(self) -> k.Batch:
        """With the present step."""
        if self._batch is None:
            raise k.StateError("nothing was mapped yet")
        return self._batch

    def prepare(
        self, sequences: list[k.KVCache], width: int, tokens: int, start: int, stream: Any
    ) -> None:
        """Maps `tokens` tokens from `start` on of every row."""
        rows, batch = len(sequences) * width, self._batch
        if batch is None or batch.max_rows < rows or batch.max_tokens < rows * tokens:
            batch = self._manager.create_batch(rows, 1 << max(rows * tokens, 256).bit_length())
        batch.prepare(sequences, tokens, start=start, stream=stream)
        self._batch = batch


def bits(tensor: Any) -> Any:
    """The tensor, or its bits as integers where NumPy lacks its type. Shares memory."""
    small = {1: torch.uint8, 2: torch.int16}.get(tensor.itemsize)
    known = tensor.dtype in (torch.float16, torch.int8, torch.uint8, torch.int16, torch.bool)
    return tensor if small is None or known else tensor.view(small)
