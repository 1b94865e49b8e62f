"""Which pages are free and how many sequences hold each. Pure.

A forked sequence shares its source's pages; whoever writes to a shared page
first takes a copy of it for itself (`PagedPool`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from bloombee.kv.ledger import ensure


class PageBook:
    """Pages 0..count-1. The ledger has seen to it that `take` never finds none."""

    def __init__(self, count: int) -> None:
        self.holders = [0] * count
        self.free = list(range(count - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """`count` free pages, held once each."""
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """Hold these pages once more."""
        shared = list(pages)
        for page in shared:
            self.holders[page] += 1
        return shared

    def drop(self, pages: Iterable[int]) -> None:
        """Hold these pages once less; those that nobody holds are free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Verify against all page tables; raises AssertionError."""
        held = Counter(page for table in tables for page in table)
        for page, holders in enumerate(self.holders):
            ensure(held[page] == holders, f"page {page}: {held[page]} tables, {holders} counted")
        unheld = {page for page, holders in enumerate(self.holders) if not holders}
        ensure(len(self.free) == len(unheld), "a page is free twice or lost")
        ensure(set(self.free) == unheld, "a free page is held")
