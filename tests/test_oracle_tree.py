"""The oracle on the prefix tree: one corruption each, and it is found."""

from __future__ import annotations

import pytest

from kvcore.control.slots import PRIVATE, PUBLISHED, SHARED
from kvcore.testing import ContentError, OracleError, check
from tests.helpers import opaque_manager, row, typed_manager
from tests.prefixes import Author, began, fresh, turn


class Scene:
    """A trunk of two blocks with two branches and a partial block; one user, one pin."""

    def __init__(self):
        self.m = opaque_manager()
        self.trunk = fresh(8)
        for more in (fresh(8), fresh(4), fresh(2)):
            turn(self.m, self.trunk + more)
        self.user = began(self.m, self.trunk + fresh(3))
        self.pin = self.m.pin(self.trunk[:4])
        self.reuse = self.m._runtime.control.reuse
        self.slots = self.m._runtime.control.slots[0]
        nodes = list(self.reuse.tree.walk())
        self.upper = next(node for node in nodes if node.start == 0)
        self.long = next(node for node in nodes if node.start and node.size == 2)
        self.partial = next(node for node in nodes if node.partial)


@pytest.fixture
def scene():
    return Scene()


def test_what_is_right_passes(scene):
    check(scene.m)
    assert scene.upper.size == 2


def miscount_the_evictable(scene):
    scene.slots.num_evictable += 1


def forget_that_a_page_is_published(scene):
    scene.slots.in_tree[scene.long.slots[0, 1]] = PRIVATE


def keep_a_mark(scene):
    scene.slots.in_tree[scene.slots.free_slots()[0]] = PUBLISHED


def retire_what_nobody_holds(scene):
    scene.slots.in_tree[scene.slots.free_slots()[0]] = SHARED


def forget_a_pin(scene):
    scene.slots.refs[row(scene.user)[0]] -= 1


def free_a_published_page(scene):
    scene.slots._stack[0] = scene.partial.slots[0, 0]


def publish_a_page_twice(scene):
    scene.partial.slots[0, 0] = scene.long.slots[0, 0]


def show_the_wrong_page(scene):
    scene.upper.slots[0, [0, 1]] = scene.upper.slots[0, [1, 0]]


def forget_a_tip(scene):
    scene.reuse.tree.queue.leave(scene.long)


def leave_a_tip_where_it_was(scene):
    scene.long.touch(2, 99)


def use_a_tip_after_its_trunk(scene):
    scene.reuse.tree.queue.leave(scene.long)
    scene.long.touch(2, 99)
    scene.reuse.tree.queue.offer(scene.long)


def stamp_beyond_the_end(scene):
    scene.upper.touch(3, 99)


def lose_the_way_up(scene):
    scene.partial.parent = scene.upper.parent


def shift_a_node(scene):
    scene.long.start += 1


def lose_a_token(scene):
    del scene.upper.tokens[-4:]


def forget_a_claim(scene):
    del scene.reuse.claims[scene.user._sequence]


def commit_beyond_the_history(scene):
    scene.reuse.claims[scene.user._sequence].committed = 99


@pytest.mark.parametrize(
    ("corrupt", "rule"),
    [
        (miscount_the_evictable, "num_evictable"),
        (forget_that_a_page_is_published, "marks of slots"),
        (keep_a_mark, "marks of slots"),
        (retire_what_nobody_holds, "marks of slots"),
        (forget_a_pin, "holders"),
        (free_a_published_page, "free and in the tree"),
        (publish_a_page_twice, "pages of one node each"),
        (show_the_wrong_page, "sequence 0: pages of node"),
        (forget_a_tip, "wait for eviction"),
        (leave_a_tip_where_it_was, "used later than what is above it"),
        (use_a_tip_after_its_trunk, "used later than what is above it"),
        (stamp_beyond_the_end, "ends of stamps inside"),
        (lose_the_way_up, "found from above"),
        (shift_a_node, "start"),
        (lose_a_token, "bytes of tokens"),
        (forget_a_claim, "sequences with a claim"),
        (commit_beyond_the_history, "committed tokens in the history"),
    ],
)
def test_check_finds_a_corrupted_tree(scene, corrupt, rule):
    corrupt(scene)
    with pytest.raises(OracleError, match=rule) as caught:
        check(scene.m)
    assert "0: [" in str(caught.value)  # the dump of the tree is there


def test_check_finds_a_tip_that_moved_in_the_line(scene):
    scene.slots.priority[scene.long.slots[0, 1]] = 90
    with pytest.raises(OracleError, match="its place in the line"):
        check(scene.m)


def test_the_engine_writes_no_page_that_others_may_read():
    author = Author(typed_manager(slots=16, T=4, layers=1))
    a = fresh(12)
    author.turn(a)
    kv = author.began(a[:8], 12)
    b = fresh(3)
    author.computes(kv, b, commit=False)
    with pytest.raises(ContentError, match="position 4: it is committed"):
        author.engine.write([kv], 1, start=4)
    kv.commit(b[:2], is_end=True)
    with pytest.raises(ContentError, match=r"block 2: the page in slot \d+ is published"):
        author.engine.write([kv], 1, start=10)


def test_the_engine_finds_the_page_of_another_prefix():
    author = Author(typed_manager(slots=16, T=4, layers=1))
    a, b = fresh(8), fresh(8)
    author.turn(a)
    author.turn(b)
    one, other = author.m._runtime.control.reuse.tree.walk()
    one.slots[0, 1], other.slots[0, 1] = other.slots[0, 1], one.slots[0, 1]
    reader = author.began(a)
    with pytest.raises(ContentError, match="4 tokens are not what was written"):
        author.engine.verify([reader])
