"""RELIABILITY.md F3: random operations on the pool against a plain model, for each policy; the model also predicts the
very page that every eviction takes.

One token per page, so a page's contents are its path: (namespace, token, token, ...).
"""

import random

import pytest

from jaxinfer.config import EVICTION_POLICIES
from jaxinfer.schedule.page_pool import PagePool
from jaxinfer.schedule.prefix_cache import PageChain

NUM_PAGES = 25  # the null page counted
MAX_DEPTH = 6
Path = tuple


class Model:
    """Owners and contents of pages as two dictionaries; everything else is worked out by looking at all of them."""

    def __init__(self, policy: str):
        self.policy = policy
        self.owners: dict[int, int] = {}
        self.page_of: dict[Path, int] = {}
        self.use_of: dict[Path, dict[str, float]] = {}
        self.tick, self.clock = 0, 0.0

    @property
    def idle(self) -> list[Path]:
        return [path for path, page_id in self.page_of.items() if page_id not in self.owners]

    def touch(self, path: Path) -> None:
        self.tick += 1
        self.use_of[path] |= {"last": self.tick, "clock": self.clock}

    def rank(self, path: Path) -> tuple:
        use, depth = self.use_of[path], len(path) - 2
        return {
            "lru": (use["last"],),
            "lfu": (use["count"], use["last"]),
            "fifo": (use["created"],),
            "cost": (use["clock"] + use["count"] * (1 + depth / 64), use["last"]),
        }[self.policy]

    def allocate(self, count: int) -> bool:
        """Whether there is room; evicts for it."""
        if NUM_PAGES - 1 - len(self.owners) < count:
            return False
        while NUM_PAGES - 1 - len(self.owners.keys() | set(self.page_of.values())) < count:
            idle = self.idle
            inner = {path[:-1] for path in idle}
            victim = min((path for path in idle if path not in inner), key=self.rank)
            self.clock = max(self.clock, self.rank(victim)[0])
            self.drop(victim)
        return True

    def drop(self, top: Path) -> None:
        for path in [path for path in self.page_of if path[: len(top)] == top]:
            del self.page_of[path], self.use_of[path]

    def match(self, path: Path) -> list[int]:
        found = []
        for end in range(2, len(path) + 1):
            if path[:end] not in self.page_of:
                break
            found.append(self.page_of[path[:end]])
        return found

    def share(self, page_ids: list[int]) -> None:
        path_of = {page_id: path for path, page_id in self.page_of.items()}
        for page_id in page_ids:
            self.owners[page_id] = self.owners.get(page_id, 0) + 1
            if page_id in path_of:
                self.touch(path_of[page_id])
                self.use_of[path_of[page_id]]["count"] += 1

    def free(self, page_ids: list[int]) -> None:
        path_of = {page_id: path for path, page_id in self.page_of.items()}
        for page_id in reversed(page_ids):
            self.owners[page_id] -= 1
            if not self.owners[page_id]:
                del self.owners[page_id]
                if page_id in path_of:
                    self.touch(path_of[page_id])

    def publish(self, path: Path, page_ids: list[int]) -> None:
        for end in range(2, len(path) + 1):
            if path[:end] not in self.page_of:
                self.page_of[path[:end]] = page_ids[end - 2]
                self.use_of[path[:end]] = {"count": 1, "created": self.tick + 1}
                self.touch(path[:end])


class Pair:
    """The pool and the model side by side, and the sequences that hold pages: [path, chain, page_ids] each."""

    def __init__(self, policy: str, rng: random.Random):
        self.rng = rng
        self.pool, self.model = PagePool(NUM_PAGES, 1, policy=policy), Model(policy)
        self.held: list[tuple[Path, PageChain, list[int]]] = []

    def allocate(self, count: int) -> list[int] | None:
        taken = self.pool.allocate(count)
        assert (taken is not None) == self.model.allocate(count)
        for page_id in taken or ():
            assert page_id not in self.model.owners
            assert page_id not in self.model.page_of.values()
            self.model.owners[page_id] = 1
        return taken

    def start(self) -> None:
        """A new sequence: what is cached is shared, the rest allocated."""
        rng = self.rng
        path = (rng.choice("ab"), *(rng.randrange(3) for _ in range(rng.randint(1, MAX_DEPTH))))
        chain = PageChain(path[0], 1)
        chain.extend(path[1:], len(path) - 1)
        found = self.pool.match(chain, MAX_DEPTH)
        assert found == self.model.match(path)
        self.pool.share(found)
        self.model.share(found)
        taken = self.allocate(len(path) - 1 - len(found))
        if taken is None:
            self.pool.free(found)
            self.model.free(found)
        else:
            self.held.append((path, chain, [*found, *taken]))

    def extend(self) -> None:
        index = self.rng.randrange(len(self.held))
        path, chain, page_ids = self.held[index]
        taken = self.allocate(1)
        if taken is not None:
            path = (*path, self.rng.randrange(3))
            chain.extend(path[1:], len(path) - 1)
            self.held[index] = (path, chain, [*page_ids, *taken])

    def publish(self) -> None:
        path, chain, page_ids = self.rng.choice(self.held)
        self.pool.publish(chain, page_ids, len(page_ids))
        self.model.publish(path, page_ids)

    def fork(self) -> None:
        path, _, page_ids = self.rng.choice(self.held)
        count = self.rng.randint(1, len(page_ids))
        self.pool.share(page_ids[:count])
        self.model.share(page_ids[:count])
        chain = PageChain(path[0], 1)
        chain.extend(path[1:], count)
        self.held.append((path[: count + 1], chain, page_ids[:count]))

    def free(self) -> None:
        path, chain, page_ids = self.held.pop(self.rng.randrange(len(self.held)))
        if self.rng.random() < 0.5:
            self.pool.publish(chain, page_ids, len(page_ids))
            self.model.publish(path, page_ids)
        self.pool.free(page_ids)
        self.model.free(page_ids)

    def withdraw(self) -> None:
        path, chain, page_ids = self.rng.choice(self.held)
        first = self.rng.randrange(len(page_ids))
        self.pool.withdraw(chain, first)
        self.model.drop(path[: first + 2])

    def check(self) -> None:
        model = self.model
        num_idle = len(model.idle)
        num_used = len(model.owners)
        assert self.pool.count() == (NUM_PAGES - 1 - num_idle - num_used, num_idle, num_used)
        for _, _, page_ids in self.held[-2:]:
            assert all(self.pool.num_owners(page_id) == model.owners[page_id] for page_id in page_ids)

    def run(self, num_operations: int) -> None:
        verbs = [self.start, self.extend, self.publish, self.fork, self.free, self.withdraw]
        weights = [30, 15, 15, 8, 30, 2]
        for number in range(num_operations):
            verb = self.rng.choices(verbs, weights)[0] if self.held else self.start
            verb()
            self.check()
            if number % 1_000 == 0:
                self.pool.audit()
        while self.held:
            self.free()
        self.pool.audit()
        assert self.pool.count().used == 0
        assert self.pool.allocate(NUM_PAGES - 1) is not None
        self.pool.audit()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_f3_pool_agrees_with_a_plain_model(policy):
    Pair(policy, random.Random(1)).run(25_000)


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_f3_pool_agrees_with_a_plain_model_over_a_million_operations(policy):
    Pair(policy, random.Random(2)).run(250_000)
