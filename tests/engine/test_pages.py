import pytest

from zerogap.engine.pages import PagePool, page_key, root_key


def test_pages_are_clean_the_first_time_and_dirty_after():
    pool = PagePool(2, 4)
    first = [pool.take(), pool.take()]
    assert pool.pop_dirty() == ()
    pool.release(first)
    assert pool.take() in first
    assert len(pool.pop_dirty()) == 1
    assert pool.pop_dirty() == ()


def test_memory_that_was_touched_is_used_again_before_fresh_memory():
    pool = PagePool(100, 4)
    for _ in range(5):
        pages = [pool.take() for _ in range(7)]
        assert sorted(pages) == list(range(7))
        pool.publish(pages[0], b"of this version")
        pool.release(reversed(pages))
        pool.drop_published()


def test_a_published_page_outlives_its_holder_and_the_longest_unused_goes_first():
    pool = PagePool(3, 1)
    pages = [pool.take() for _ in range(3)]
    keys = [bytes([i]) for i in range(3)]
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.release([pages[1], pages[0], pages[2]])
    assert pool.available == 3
    pool.share(pages[1])
    pool.release([pages[1]])  # used again: now the most recently used
    assert pool.take() == pages[0]
    assert pool.find(keys[0]) is None
    assert [pool.find(key) for key in keys[1:]] == pages[1:]
    assert pool.take() == pages[2]


def test_a_shared_page_returns_after_its_last_holder():
    pool = PagePool(2, 1)
    page = pool.take()
    pool.publish(page, b"k")
    pool.share(page)
    pool.release([page])
    assert pool.available == 1
    pool.release([page])
    assert pool.available == 2


def test_the_first_page_under_a_key_stays_the_one():
    pool = PagePool(2, 1)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    assert pool.find(b"k") == first
    pool.release([first, second])
    assert pool.take() == second, "it is not kept for others, so it is the first to be taken again"


def test_dropping_forgets_held_pages_too():
    pool = PagePool(2, 1)
    held, idle = pool.take(), pool.take()
    pool.publish(held, b"h")
    pool.publish(idle, b"i")
    pool.release([idle])
    pool.drop_published()
    assert pool.find(b"h") is None
    assert pool.find(b"i") is None
    assert pool.available == 1
    pool.release([held])
    assert pool.available == 2


def test_without_prefix_cache_nothing_is_published():
    pool = PagePool(1, 1, prefix_cache=False)
    page = pool.take()
    pool.publish(page, b"k")
    assert pool.find(b"k") is None


def test_misuse_is_an_assertion():
    pool = PagePool(1, 1)
    with pytest.raises(AssertionError):
        pool.release([0])
    with pytest.raises(AssertionError):
        pool.share(pool.take())


def test_keys_depend_on_version_position_and_every_token():
    root = root_key(0)
    keys = {
        root_key(1),
        root,
        page_key(root, [1, 2]),
        page_key(root, [2, 1]),
        page_key(root_key(1), [1, 2]),
        page_key(page_key(root, [1, 2]), [1, 2]),
        page_key(root, [1, 2, 0]),
    }
    assert len(keys) == 7
    assert page_key(root, [1, 2]) == page_key(root_key(0), [1, 2])
