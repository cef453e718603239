"""A cache for Hugging Face transformers 5 whose keys and values lie in kvcore pages.

`cache_for(model.config, ...)` makes the cache that `model.generate(..., cache=cache)` takes:
greedy search, sampling and beam search, decoders and encoder-decoders::

    with cache_for(model.config, num_beams=4) as cache:
        tokens = model.generate(**inputs, num_beams=4, cache=cache)

(`past_key_values=` is the old name of `cache=` and works as long as transformers takes it.)

`generate` repeats every prompt `num_beams` times, and stock caches hold it as often. This one
writes a prompt once, widens the sequence to beams when their tokens first differ, and follows them
by passing full pages on by reference. The model still gets dense tensors, gathered from the pages
layer by layer, so any model and any attention works, and one layer's are all that is ever dense.

What is as in `DynamicCache`, and what is not:

* Rows of one length: left padding is cached like tokens, and the model masks it.
* Layers with a window keep everything, and the model masks what has left it; each layer reports
  full lengths, so masks and keys agree. Tokens are the same. A stock cache drops what has left the
  window, so sums over the rest are taken in another order: scores differ by a few units of
  rounding, without windows by none.
* `crop`, and with it assisted decoding, as long as nothing final is cut off: what beams share or
  others may reuse stays. There is no need to record a past.
* T5 with other numbers of layers in encoder and decoder works; the cache `generate` makes by itself
  (transformers 5.24) has as many layers as the encoder, and fails.
* Caches of the same managers share what they publish: full pages of a decoder's prompts, and the
  cross-attention of an encoder's input, as a whole.
* Refused with the reason: gradients, `batch_repeat_interleave`, `batch_select_indices`, recurrent
  and latent (MLA) layers, layers that share another's cache.

The host looks at tensors at one place per step until the beams differ, and at `beam_idx`: on CUDA
both wait for the stream. `docs/transformers.md` says more.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from transformers.cache_utils import EncoderDecoderCache

import kvcore as k
from kvcore.checks import as_int
from kvcore.device.base import Device
from kvcore.errors import wrong
from kvcore_adapters.for_transformers_cache import PagedCache
from kvcore_adapters.for_transformers_config import (
    check_manager,
    decoder_layers,
    open_manager,
    torch_type,
    type_name,
)
from kvcore_adapters.for_transformers_inputs import padded, whole_inputs
from kvcore_adapters.for_transformers_rows import PagedRows

__all__ = ["KVCoreCache", "KVCoreEncoderDecoderCache", "cache_for"]


class KVCoreCache(PagedCache):
    """The cache of a decoder.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        `model.config`.
    manager : KVCacheManager, optional
        Where pages come from, for several caches to share them. Layers 0, 1, ... with buffers "key"
        and "value"; for `num_beams` above 1 with that `max_beam_width` and without partial commit.
        Default: one of the cache's own for up to 64 sequences, described by what follows.
    num_beams : int
        Neighbouring rows of `generate`'s batch that start out equal: its `num_beams`, or its
        `num_return_sequences` if that is larger.
    device : str or Device
        Where the pages lie; the model's device. "host" or "cuda".
    dtype : str or torch.dtype, optional
        Of keys and values. Default: the config's, or float32.
    max_tokens : int
        Tokens there are pages for, all rows together; what rows share counts once.
    tokens_per_block : int
        Tokens of a page.
    prompt : int tensor [batch, length], optional
        Finds what a cache of this manager published of it, so that `generate`, called with the same
        prompt, computes only the rest. All rows take the length of the shortest match.
    attention_mask : tensor, optional
        Of the prompt. With a padded row nothing is reused: padding shifts positions.
    reuse_scope : ReuseScope, optional
        The boundary of that reuse, for finding and for publishing.

    Raises
    ------
    NotImplementedError
        The model has layers whose cache is something else than keys and values.
    ValueError, TypeError
        Wrong arguments, or a manager that does not fit.
    OutOfPagesError
        Here or in `generate`: too few pages. Nothing changed.

    Notes
    -----
    In `update`, rows of a sequence that differ in the first forward raise `ValueError`: the cache
    was made for another `num_beams`. Later, they are what parts beams.

    Examples
    --------
    >>> import torch, transformers
    >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)
    >>> config.bos_token_id = config.eos_token_id = None
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> with KVCoreCache(config, num_beams=2) as cache:
    ...     out = model.generate(torch.ones(1, 40, dtype=torch.long), num_beams=2, cache=cache,
    ...                          attention_mask=torch.ones(1, 40), max_new_tokens=4, pad_token_id=0)
    ...     out.shape, [kv.get_base_page_indices(0, beam).tolist()[:2] for beam in (0, 1)
    ...                 for kv in cache.sequences]
    (torch.Size([1, 44]), [[0, 1], [0, 1]])
    """

    def __init__(
        self,
        config: Any,
        manager: k.KVCacheManager | None = None,
        *,
        num_beams: int = 1,
        device: str | Device = "host",
        dtype: object = None,
        max_tokens: int = 8192,
        tokens_per_block: int = 16,
        prompt: Any = None,
        attention_mask: Any = None,
        reuse_scope: k.ReuseScope | None = None,
    ) -> None:
        _check_kind(config, encoder_decoder=False)
        layers, owns = decoder_layers(config), manager is None
        with ExitStack() as undo:
            if manager is None:
                name = type_name(config, dtype)
                manager = open_manager(
                    layers, num_beams, device, name, max_tokens, tokens_per_block
                )
                undo.callback(manager.shutdown)
            check_manager("manager", manager, len(layers), num_beams)
            rows = PagedRows(manager, len(layers), num_beams, reuse_scope)
            if prompt is not None and not any(padded(prompt, attention_mask)):
                # One token has to be computed, for logits.
                rows.adopt(prompt[:, :-1].tolist(), prompt.new_empty(0, dtype=torch_type(manager)))
            undo.pop_all()
        super().__init__(rows, owns_manager=owns)

    def publish(self, prompt: Any, attention_mask: Any = None) -> int:
        """Lets later caches of the same manager find the full pages of prompts.

        Parameters
        ----------
        prompt : int tensor [batch, length]
            What the first `length` cached tokens are, as `generate` got it: not repeated.
        attention_mask : tensor, optional
            Of the prompt. Padded rows are never published.

        Returns
        -------
        int
            How many sequences were published.

        Raises
        ------
        ValueError
            Another number of rows, or more tokens than are cached.
        """
        count, length = len(self._rows.sequences), self.get_seq_length()
        pads = padded(prompt, attention_mask)
        if len(prompt) != count or prompt.shape[1] > length:
            expected = f"{count} rows of at most {length} tokens, which are cached"
            raise wrong("prompt", expected, list(prompt.shape))
        whole = [i for i in range(count) if not pads[i]]
        for i in whole:
            self._rows.publish(i, prompt[i].tolist())
        return len(whole)


class KVCoreEncoderDecoderCache(EncoderDecoderCache):
    """The caches of an encoder-decoder: self-attention, and cross-attention in a second manager.

    The cross-attention's keys and values are written once and stay one sequence per `num_beams`
    rows, whatever the beams do; `reorder_cache` moves none of them.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        `model.config`.
    manager, cross_manager : KVCacheManager, optional
        Both or neither.
    max_encoder_tokens : int
        Positions of the encoder there are pages for, all prompts together.
    encoder_input : tensor [batch, ...], optional
        Ids or features as `generate` gets them, not repeated. Finds the cross-attention that a
        cache of these managers published of it: nothing of it is computed then, and its full pages
        are shared. An input is found as a whole, and all rows or none.
    attention_mask : tensor [batch, ...], optional
        Of that input: what was published with another one, or without, is another input.
    encoder_length : int, optional
        Positions that the encoder makes of its input. Default: those of the ids.
    reuse_scope : ReuseScope, optional
        The boundary of that reuse, for finding and for publishing.
    num_beams, device, dtype, max_tokens, tokens_per_block
        As for `KVCoreCache`; both managers are on the same device.

    Notes
    -----
    Errors as for `KVCoreCache`. For another input call `reset()`, or make another cache. `generate`
    runs the encoder whatever was found, unless it is given `encoder_outputs`. Inputs are hashed on
    the host; each different one is remembered until the process ends, about 200 bytes. Prompts of
    the decoder are not reused: its keys and values depend on the encoder's input, too.
    """

    def __init__(
        self,
        config: Any,
        manager: k.KVCacheManager | None = None,
        cross_manager: k.KVCacheManager | None = None,
        *,
        num_beams: int = 1,
        device: str | Device = "host",
        dtype: object = None,
        max_tokens: int = 8192,
        max_encoder_tokens: int = 8192,
        tokens_per_block: int = 16,
        encoder_input: Any = None,
        attention_mask: Any = None,
        encoder_length: int | None = None,
        reuse_scope: k.ReuseScope | None = None,
    ) -> None:
        _check_kind(config, encoder_decoder=True)
        inputs = whole_inputs(encoder_input, attention_mask, encoder_length)
        if (manager is None) != (cross_manager is None):
            raise wrong("manager and cross_manager", "both or neither", (manager, cross_manager))
        layers, owns = decoder_layers(config), manager is None
        with ExitStack() as undo:
            if manager is None or cross_manager is None:
                how = type_name(config, dtype), max_tokens, tokens_per_block
                manager = open_manager(layers, num_beams, device, *how)
                undo.callback(manager.shutdown)
                how = how[0], as_int("max_encoder_tokens", max_encoder_tokens, 1), tokens_per_block
                cross_manager = open_manager(layers, 1, manager.device, *how)
                undo.callback(cross_manager.shutdown)
            check_manager("manager", manager, len(layers), num_beams)
            check_manager("cross_manager", cross_manager, len(layers), 1)
            own = PagedRows(manager, len(layers), num_beams)
            cross = PagedRows(cross_manager, len(layers), num_beams, reuse_scope, written_once=True)
            if inputs:
                cross.adopt(inputs, encoder_input.new_empty(0, dtype=torch_type(cross_manager)))
                own.expected = cross.num_rows
            undo.pop_all()
        self._own, self._cross = own, cross
        super().__init__(PagedCache(own, owns_manager=owns), PagedCache(cross, owns_manager=owns))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def publish(self, encoder_input: Any, attention_mask: Any = None) -> int:
        """Lets later caches of the same managers find the cross-attention of an input.

        Parameters
        ----------
        encoder_input, attention_mask : tensor
            What `generate` got, as for the constructor.

        Returns
        -------
        int
            How many sequences were published. Where the cross manager has partial commit off, those
            that do not fill their last page will not be found.

        Raises
        ------
        ValueError
            Another number of rows, or of ids than there are positions.
        """
        rows, length = self._cross, self.cross_attention_cache.get_seq_length()
        if len(encoder_input) != len(rows.sequences):
            expected = f"{len(rows.sequences)} rows, which are cached"
            raise wrong("encoder_input", expected, len(encoder_input))
        for i, tokens in enumerate(whole_inputs(encoder_input, attention_mask, length)):
            rows.publish(i, tokens)
        return len(rows.sequences)

    def reset(self) -> None:
        """Frees all pages; the cache is as new, but reuses nothing."""
        self._own.expected = 0
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the decoder's last `-tokens_to_remove` tokens, as `PagedCache.crop`."""
        self.self_attention_cache.crop(tokens_to_remove)

    def close(self) -> None:
        """Frees all pages, and the managers if the cache made them. Idempotent."""
        self.reset()
        self.cross_attention_cache.close()  # the device is the other manager's
        self.self_attention_cache.close()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused, as by `PagedCache`."""
        self.self_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: object) -> None:
        """Refused, as by `PagedCache`."""
        self.self_attention_cache.batch_select_indices(indices)


def _is_encoder_decoder(config: Any) -> bool:
    found = getattr(config, "is_encoder_decoder", None)
    if found is None:
        text = "the configuration of a model"  # a model's own text is pages long
        raise TypeError(str(wrong("config", text, type(config).__name__, "pass model.config")))
    return bool(found)


def _check_kind(config: Any, *, encoder_decoder: bool) -> None:
    if _is_encoder_decoder(config) != encoder_decoder:
        kind, other = "an encoder-decoder's", "KVCoreCache"
        if not encoder_decoder:
            kind, other = "a decoder's", "KVCoreEncoderDecoderCache"
        raise wrong("config", kind, type(config).__name__, f"use {other}, or cache_for")


def cache_for(config: Any, **settings: Any) -> KVCoreCache | KVCoreEncoderDecoderCache:
    """The cache for `model.config`: `KVCoreEncoderDecoderCache` where it needs one.

    Takes the keyword arguments of the class it makes.
    """
    if _is_encoder_decoder(config):
        return KVCoreEncoderDecoderCache(config, **settings)
    return KVCoreCache(config, **settings)
