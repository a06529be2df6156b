"""Pages of KV memory: who holds them, which are shared, which can be had.

Only full pages whose rows are all computed are ever shared. They are published under a key chained over the weights
version and all token ids up to the page's end, so equal keys mean equal contents. A published page that nobody holds
stays usable until memory is needed; the one unused for longest goes first. Of the free ones the page freed last goes
first, so that a run which needs a part of the memory stays in that part: the system gives memory on first touch, which
on a virtual machine took 30 ms for 12 MiB. A page that was written before is handed out as *dirty*: it must be cleared
before its new owner's rows are computed, since a non-finite value left in it would otherwise reach a sequence that has
nothing to do with it (law 1).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


def root_key(version: int) -> bytes:
    """Return the parent key of first pages under weights ``version``."""
    return blake2b(b"zerogap weights version %d" % version, digest_size=16).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of a full page with these token ids, whose preceding page has key ``parent``."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Reference-counted pages, numbered from 0, with the prefix cache over them.

    Args:
        num_pages: pages in all.
        page_size: positions per page.
        prefix_cache: whether published pages can be found again.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the last one goes first
        self._used_before = [False] * num_pages
        self._dirty: list[int] = []
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and held by nobody, least recently used first

    @property
    def available(self) -> int:
        """Pages that ``take`` can hand out now."""
        return len(self._free) + len(self._idle)

    def pages_for(self, positions: int) -> int:
        """Return how many pages hold this many positions."""
        return -(-positions // self.page_size)

    def take(self) -> int:
        """Hand out a page to a new holder, evicting the published page unused for longest if none is free."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._unpublish(page)
        self.holders[page] = 1
        if self._used_before[page]:
            self._dirty.append(page)
        self._used_before[page] = True
        return page

    def share(self, page: int) -> None:
        """Add a holder to a published page."""
        assert page in self._key_of, f"page {page} is not published"
        if not self.holders[page]:
            del self._idle[page]
        self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each page; give a sequence's last page first, so that beginnings survive longest."""
        for page in pages:
            assert self.holders[page] > 0, f"page {page} has no holder"
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Make a full, computed page findable under ``key``; the first page under a key stays the one."""
        if self.prefix_cache and key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """Return the page published under ``key``, held or idle."""
        return self._page_of.get(key)

    def drop_published(self) -> None:
        """Forget every published page; those that nobody holds become free."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()

    def pop_dirty(self) -> tuple[int, ...]:
        """Return the pages handed out since the last call that must be cleared before use."""
        dirty, self._dirty = tuple(self._dirty), []
        return dirty

    def _unpublish(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
