"""Cross-attention that caches of one manager share, found by the encoder's whole input."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch (the interop extra)")
tf = pytest.importorskip("transformers", minversion="5.24", reason="needs transformers 5.24")

from kvcore_adapters.for_transformers import KVCoreEncoderDecoderCache  # noqa: E402

import kvcore as k  # noqa: E402
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
SHAPES = {"t5": (2, 16), "bart": (4, 8), "whisper": (4, 8)}
LAYERS = {"t5": 2, "bart": 3, "whisper": 3}


def managers(name, slots=64, **cross):
    """One for each kind of attention, on one device."""
    heads, dim = SHAPES[name]
    shape = {"T": T, "layers": LAYERS[name], "heads": heads, "dim": dim}
    own = typed_manager(128, max_beam_width=4, enable_partial_commit=False, **shape)
    return {
        "manager": own,
        "cross_manager": typed_manager(slots, device=own.device, **shape, **cross),
    }


def encoded(name, given):
    """What the encoder gets, as the cache and `publish` take it."""
    if name == "whisper":
        return {"encoder_input": given["input_features"], "encoder_length": 10}
    return {"encoder_input": given["input_ids"], "attention_mask": given["attention_mask"]}


def published(kv, given):
    given = {key: value for key, value in given.items() if key != "encoder_length"}
    return kv.publish(**given)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_the_next_cache_of_the_same_input_computes_no_cross_attention(name, beams, monkeypatch):
    given, how, both = inputs(name, 3, 2 * T + 1), {"num_beams": beams}, managers(name)
    expected = run(name, given, **how)
    with paged(name, beams, **both) as first:
        assert_same(run(name, given, first, **how), expected)
        length = first.cross_attention_cache.get_seq_length()
        assert published(first, encoded(name, given)) == 3
        assert published(first, encoded(name, given)) == 3
        with paged(name, beams, **both, **encoded(name, given)) as second:
            cross = second.cross_attention_cache
            assert [cross.get_seq_length(i) for i in range(LAYERS[name])] == [length] * LAYERS[name]
            monkeypatch.setattr(cross, "update", lambda *_: pytest.fail("it was computed"))
            assert_same(run(name, given, second, **how), expected)
            for ours, theirs in zip(
                first.cross_attention_cache.sequences, cross.sequences, strict=True
            ):
                full = length // T
                assert row(ours)[:full] == row(theirs)[:full]
            assert used(both["cross_manager"]) == 3 * (length // T + 2 * (length % T > 0))
    assert used(both["cross_manager"]) == 0
    with paged(name, beams, **both, **encoded(name, given)) as third:  # nobody holds them any more
        assert third.cross_attention_cache.get_seq_length() == length
        assert_same(run(name, given, third, **how), expected)
        third.reset()
        assert_same(run(name, given, third, **how), expected)


def test_an_input_is_found_as_a_whole_and_all_rows_or_none():
    """An encoder looks both ways: equal leading tokens are not enough."""
    given, both = inputs("bart", 2, 3 * T), managers("bart")
    ids, mask = given["input_ids"], given["attention_mask"]
    with paged("bart", **both) as kv:
        run("bart", given, kv)
        assert kv.publish(ids, mask) == 2
        other = ids.clone()
        other[1, -1] = 3 + (other[1, -1] - 2) % 37
        padded = mask.clone()
        padded[0, -1] = 0
        for found, row_ids, row_mask, scope in (
            (3 * T, ids, mask, None),
            (3 * T, ids[1:], mask[1:], None),
            (3 * T, ids.flip(0), mask, None),
            (0, other, mask, None),
            (0, ids, padded, None),
            (0, ids, None, None),
            (0, ids[:, : 2 * T], mask[:, : 2 * T], None),
            (0, ids.int(), mask, None),
            (0, ids, mask, k.ReuseScope(salt=1)),
        ):
            settings = {"encoder_input": row_ids, "attention_mask": row_mask, "reuse_scope": scope}
            with paged("bart", **both, **settings) as again:
                assert again.cross_attention_cache.get_seq_length() == found
    assert [used(manager) for manager in both.values()] == [0, 0]


def test_what_was_partly_evicted_is_computed_again():
    given, both = inputs("bart", 1, 3 * T), managers("bart", slots=8)
    cross, settings = both["cross_manager"], encoded("bart", given)
    with paged("bart", **both) as kv:
        expected = run("bart", given, kv)
        published(kv, settings)
    total = cross.get_storage_statistics()[0].total
    with cross.create_kv_cache() as filler:
        assert filler.resume()
        assert filler.resize((total - 2) * T)
    with paged("bart", **both, **settings) as kv:
        assert kv.cross_attention_cache.get_seq_length() == 0
        assert_same(run("bart", given, kv), expected)


def test_another_batch_than_was_found_is_refused():
    """One sequence that was found would be broadcast to any number of rows."""
    given, both = inputs("bart", 3, 2 * T), managers("bart")
    first = {key: tensor[:1] for key, tensor in given.items()}
    with paged("bart", **both) as kv:
        run("bart", first, kv)
        published(kv, encoded("bart", first))
    with paged("bart", **both, **encoded("bart", first)) as kv:
        with pytest.raises(ValueError, match="expected 1 rows, as were found, got 3"):
            run("bart", given, kv)
        assert_same(run("bart", first, kv), run("bart", first))
        kv.reset()
        assert_same(run("bart", given, kv), run("bart", given))


def test_what_is_refused():
    given, both = inputs("whisper", 2, 3), managers("whisper")
    features, config = given["input_features"], model("whisper").config

    def cache(**settings):
        return KVCoreEncoderDecoderCache(config, **both, **settings)

    for settings, message in (
        ({"encoder_input": features}, "encoder_length: expected the positions"),
        ({"encoder_input": features, "encoder_length": 0}, "encoder_length"),
        ({"encoder_input": features[0, 0], "encoder_length": 10}, "encoder_input: .*batch"),
        ({"attention_mask": features}, "attention_mask: .*encoder_input"),
        (
            {"encoder_input": torch.ones(2, 9).int(), "attention_mask": torch.ones(3, 9)},
            "attention_mask: expected 2 rows",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            cache(**settings)
    with cache() as kv:
        with pytest.raises(ValueError, match="encoder_input: expected 0 rows"):
            kv.publish(features)
        run("whisper", given, kv)
        with pytest.raises(ValueError, match="encoder_input: expected 2 rows"):
            kv.publish(features[:1])
        with pytest.raises(ValueError, match="expected ids of 10 positions"):
            kv.publish(torch.ones(2, 9).int())
    assert [used(manager) for manager in both.values()] == [0, 0]


def test_a_manager_without_partial_commit_finds_inputs_of_full_pages():
    for length, found in ((2 * T, 2 * T), (2 * T + 1, 0)):
        given, both = inputs("bart", 2, length), managers("bart", enable_partial_commit=False)
        with paged("bart", **both) as kv:
            run("bart", given, kv)
            assert published(kv, encoded("bart", given)) == 2
        with paged("bart", **both, **encoded("bart", given)) as kv:
            assert kv.cross_attention_cache.get_seq_length() == found
