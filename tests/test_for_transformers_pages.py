"""What the transformers cache does with its pages, and when."""

from __future__ import annotations

import doctest

import pytest

torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
tf = pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")

import kvcore_adapters.for_transformers as module  # noqa: E402
from kvcore_adapters.for_transformers import (  # noqa: E402
    KVCoreCache,
    KVCoreEncoderDecoderCache,
    cache_for,
)

import kvcore as k  # noqa: E402
from kvcore.testing import FaultError, fail_at  # noqa: E402
from tests.helpers import row, typed_manager, used  # noqa: E402
from tests.test_for_transformers import (  # noqa: E402
    T,
    assert_same,
    inputs,
    model,
    one_thread,
    paged,
    run,
)

__all__ = ["one_thread"]  # a fixture
LLAMA = {"T": T, "layers": 2, "heads": 2, "dim": 8}


def states(rows: int, new: int, seed: int = 0, equal: int = 1) -> tuple[torch.Tensor, ...]:
    """Keys and values of a Llama layer, `equal` neighbouring rows the same."""
    numbers = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(2, rows // equal, 2, new, 8, generator=numbers).repeat_interleave(equal, 1)
    )


def step(kv: KVCoreCache, rows: int, new: int, seed: int = 0, equal: int = 1) -> None:
    """One forward of a model with two layers."""
    for layer in range(2):
        kv.update(*states(rows, new, seed + layer, equal), layer)


# -- how many pages --------------------------------------------------------------------------------


def test_beams_share_the_prompt():
    """160 tokens are 40 pages. Each of 8 beams has its own 7 tokens behind: 2 pages."""
    given = inputs("llama", 1, 40 * T)
    with paged("llama", 8) as kv:
        run("llama", given, kv, num_beams=8, max_new_tokens=8)
        assert kv.get_seq_length() == 40 * T + 7
        (sequence,) = kv.sequences
        rows = [row(sequence, beam) for beam in range(8)]
        assert all(pages[:40] == rows[0][:40] for pages in rows)
        assert used(kv.manager) == len({page for pages in rows for page in pages})
        # The last block is a beam's own; the one before is history, and shared where paths agree.
        last = {pages[-1] for pages in rows}
        assert len(last) == 8
        assert 40 + 1 + 8 <= used(kv.manager) <= 40 + 2 * 8 == 8 * 42 / 6


def test_exact_pages_of_beams_within_one_block():
    with paged("llama", 4) as kv:
        run("llama", inputs("llama", 3, 5 * T + 1), kv, num_beams=4, max_new_tokens=3)
        assert used(kv.manager) == 3 * (5 + 4)


def test_rows_that_sample_the_same_share_their_pages():
    with paged("llama", 4) as kv:
        how = {"do_sample": True, "top_k": 1, "num_return_sequences": 4, "max_new_tokens": T + 1}
        got = run("llama", inputs("llama", 2, 2 * T), kv, **how)
        assert len(set(map(tuple, got.sequences.tolist()))) == 2
        assert [sequence.beam_width for sequence in kv.sequences] == [1, 1]
        assert used(kv.manager) == 2 * 3


def test_cross_attention_is_written_once_for_all_beams():
    with paged("bart", 4) as kv:
        cross = kv.cross_attention_cache
        run("bart", inputs("bart", 3, 2 * T + 1), kv, num_beams=4)
        assert used(cross.manager) == 3 * 3
        assert [sequence.beam_width for sequence in cross.sequences] == [1, 1, 1]
        assert cross.manager.device is kv.self_attention_cache.manager.device
        assert cross.manager is not kv.self_attention_cache.manager


def test_padded_prompts_are_never_published():
    given = inputs("llama", 3, 3 * T, (0, 3, 0))
    with paged("llama", 2) as kv:
        run("llama", given, kv, num_beams=2)
        assert kv.publish(given["input_ids"], given["attention_mask"]) == 2
        found = [kv.manager.probe_reuse(None, p) for p in given["input_ids"].tolist()]
        assert found == [3 * T, 0, 3 * T]
        # Nor is anything found for them, even if the tokens are known.
        known = {key: tensor[::2] for key, tensor in given.items()}
        mask = known["attention_mask"].index_fill(1, torch.tensor([0]), 0)
        settings = {"manager": kv.manager, "prompt": known["input_ids"]}
        lengths = []
        for masks in ({}, {"attention_mask": mask}):
            with paged("llama", 2, **settings, **masks) as other:
                lengths.append(other.get_seq_length())
        assert lengths == [3 * T - 1, 0]


def test_a_prompt_published_twice_is_one():
    tokens, manager = inputs("llama", 1, 3 * T)["input_ids"], typed_manager(**LLAMA)
    first, second = (paged("llama", manager=manager) for _ in range(2))
    for kv in (first, second):
        step(kv, 1, 3 * T)
    keys = second.layers[0].keys
    assert [kv.publish(tokens) for kv in (first, second, first)] == [1, 1, 1]
    assert row(first.sequences[0]) == row(second.sequences[0])  # its own pages are free
    assert (used(manager), manager.probe_reuse(None, tokens[0].tolist() * 2)) == (3, 3 * T)
    assert torch.equal(second.layers[0].keys, keys)
    first.close()
    assert torch.equal(second.layers[0].keys, keys)
    second.close()
    manager.shutdown()


def test_scopes_keep_prompts_apart():
    tokens = inputs("llama", 1, 3 * T)["input_ids"]
    with paged("llama", reuse_scope=k.ReuseScope(salt=1)) as kv:
        step(kv, 1, 3 * T)
        kv.publish(tokens)
        found = [
            paged("llama", manager=kv.manager, prompt=tokens, reuse_scope=scope).get_seq_length()
            for scope in (None, k.ReuseScope(salt=2))
        ]
        assert found == [0, 0]
        scope = k.ReuseScope(salt=1)
        with paged("llama", manager=kv.manager, prompt=tokens, reuse_scope=scope) as other:
            assert other.get_seq_length() == 3 * T - 1


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_all_pages_are_free_after_close(name):
    kv = paged(name, 4)
    managers = [
        part.manager
        for part in (
            [kv] if name == "llama" else [kv.self_attention_cache, kv.cross_attention_cache]
        )
    ]
    run(name, inputs(name, 3, 9), kv, num_beams=4)
    assert all(used(manager) for manager in managers)
    kv.reset()
    assert [used(manager) for manager in managers] == [0] * len(managers)
    run(name, inputs(name, 3, 9), kv, num_beams=4)
    kv.close()
    kv.close()
    for manager in managers:
        with pytest.raises(k.StateError, match=r"shut down|closed"):
            manager.create_kv_cache()


def test_caches_of_one_manager_share_its_pool():
    with typed_manager(slots=64, max_beam_width=4, enable_partial_commit=False, **LLAMA) as manager:
        caches = [paged("llama", 4, manager=manager) for _ in range(2)]
        for kv in caches:
            given = inputs("llama", 2, 2 * T)
            assert_same(run("llama", given, kv, num_beams=4), run("llama", given, num_beams=4))
        for kv in caches:
            kv.close()
        assert used(manager) == 0


# -- out of pages ----------------------------------------------------------------------------------


def test_a_step_without_room_changes_nothing_and_can_be_repeated():
    manager = typed_manager(slots=8, max_beam_width=4, enable_partial_commit=False, **LLAMA)
    kv, other = (paged("llama", 4, manager=manager) for _ in range(2))
    step(kv, 4, 2 * T + 1, equal=4)  # 3 pages, of which 1 is every beam's own later
    step(other, 4, 3 * T, equal=4)  # 3 pages
    assert used(manager) == 6
    for _ in range(2):
        with pytest.raises(k.OutOfPagesError, match="beams"):
            kv.update(*states(4, 1, 7), 0)
        assert (used(manager), kv.get_seq_length(), kv.sequences[0].beam_width) == (6, 2 * T + 1, 1)
    other.close()
    step(kv, 4, 1, 7)
    assert (used(manager), kv.sequences[0].beam_width) == (2 + 4, 4)
    kv.close()
    manager.shutdown()


def test_beams_widen_in_all_groups_or_in_none():
    """Two groups of two blocks, both being written: room for one of them to widen."""
    manager = typed_manager(slots=8, max_beam_width=4, enable_partial_commit=False, **LLAMA)
    with paged("llama", 4, manager=manager) as kv:
        step(kv, 8, T + 1, equal=4)
        assert used(manager) == 4
        with pytest.raises(k.OutOfPagesError):
            kv.update(*states(8, 1, 7), 0)
        assert used(manager) == 4
        assert [sequence.beam_width for sequence in kv.sequences] == [1, 1]
        step(kv, 8, 1, 7, equal=4)
        assert kv.get_seq_length() == T + 2
    manager.shutdown()


def test_a_prompt_without_room_leaves_nothing_behind():
    with typed_manager(slots=8, **LLAMA) as manager:
        kv = paged("llama", manager=manager)
        with pytest.raises(k.OutOfPagesError, match=r"20 more tokens of 2 rows at 0: 2 missing"):
            step(kv, 2, 5 * T)
        assert (used(manager), kv.sequences, kv.get_seq_length()) == (0, (), 0)
        step(kv, 2, 4 * T)
        kv.close()


def test_a_step_that_fails_in_the_device_leaves_beams_and_pages_as_they_were():
    """The first forward, and the one that widens: each needs a larger batch than there is."""
    manager = typed_manager(slots=64, max_beam_width=4, enable_partial_commit=False, **LLAMA)
    with paged("llama", 4, manager=manager) as kv:
        with fail_at(manager, "memory"), pytest.raises(FaultError):
            step(kv, 4, 2 * T + 1, equal=4)
        assert (used(manager), kv.sequences, kv.get_seq_length()) == (0, (), 0)
        step(kv, 4, 2 * T + 1, equal=4)
        with fail_at(manager, "memory"), pytest.raises(FaultError):
            kv.update(*states(4, T, 7), 0)
        assert (used(manager), kv.sequences[0].beam_width, kv.sequences[0].capacity) == (3, 1, 9)
        keys = kv.layers[1].keys
        step(kv, 4, T, 7)
        assert (used(manager), kv.sequences[0].beam_width, kv.get_seq_length()) == (10, 4, 13)
        assert torch.equal(kv.layers[1].keys[:, :, :9], keys)
    manager.shutdown()


# -- masks and lengths -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_lengths_and_mask_sizes_agree_with_the_keys(name):
    with paged(name) as kv:
        assert (len(kv), kv.get_seq_length(), kv.get_mask_sizes(9, 0)) == (2, 0, (9, 0))
        assert (kv.layers[0].keys, kv.is_initialized) == (None, False)
        step(kv, 2, 9)
        assert (kv.get_seq_length(), kv.get_mask_sizes(1, 1)) == (9, (10, 0))
        keys, _ = kv.update(*states(2, 1), 0)
        assert keys.shape == (2, 2, 10, 8)
        assert [kv.get_seq_length(layer) for layer in (0, 1)] == [10, 9]
        assert kv.layers[1].keys.shape == (2, 2, 9, 8)
        assert (kv.get_max_length(), kv.is_sliding) == (-1, [False, False])
        assert (kv.is_croppable, kv.is_compileable) == (True, False)


# -- crop ------------------------------------------------------------------------------------------


def test_crop_gives_pages_back():
    with paged("llama") as kv:
        kv.crop(0)
        step(kv, 1, 2 * T + 1)
        before = kv.layers[0].keys
        kv.crop(-2)
        assert (kv.get_seq_length(), used(kv.manager)) == (2 * T - 1, 2)
        assert torch.equal(kv.layers[0].keys, before[:, :, :-2])
        with pytest.raises(ValueError, match=r"tokens_to_remove: .* in \[-7, 0\], got 1"):
            kv.crop(1)
        with pytest.raises(ValueError, match="got -8"):
            kv.crop(-8)


def test_crop_stops_at_what_beams_share():
    with paged("llama", 2) as kv:
        step(kv, 2, T + 1, equal=2)
        step(kv, 2, 2, 7)
        kv.crop(-1)
        kv.reorder_cache(torch.tensor([1, 0]))
        step(kv, 2, 2, 9)
        kv.crop(-2)
        with pytest.raises(NotImplementedError, match="crop to 5 tokens: 6 are final"):
            kv.crop(-1)
        assert kv.get_seq_length() == T + 2


# -- which class ---------------------------------------------------------------------------------


def test_cache_for_makes_what_the_model_needs():
    with cache_for(model("llama").config) as one, cache_for(model("t5").config) as two:
        assert (type(one), type(two)) == (KVCoreCache, KVCoreEncoderDecoderCache)


def test_doctests():
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0
