"""Sends each request to the replica where it costs least."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rootlace.runtime.cache.journal import Change, LazyKeys, PrefixDigests
from rootlace.runtime.contracts.messages import Below, kv_space
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.routing.index import MOST_ENTRIES, PrefixIndex

# Below --------------------------------------------------------------------------------------------
#
# What lies below the pools of all replicas: on disks, or in main memory beside a GPU.


@dataclass(frozen=True)
class Read:
    """These `replicas` (bits) have a prompt's blocks before number `end`, of which they would read
    so many at each level: pairs of a level and a count."""

    end: int
    replicas: int
    blocks: tuple[tuple[int, int], ...] = ()


class BelowPools:
    """A table for each level, of as many blocks as `replicas` have there and at most `most`, by the
    keys that engines tell (`Below`), and what reading takes."""

    def __init__(self, replicas: int, most: int) -> None:
        self._replicas = replicas
        self._most = most
        self._levels: dict[int, PrefixIndex] = {}
        self._seconds: dict[int, np.ndarray] = {}
        """Of a block, by replica."""

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def apply(self, replica: int, told: Sequence[Below], fresh: bool) -> None:
        """Take in what a replica says. `fresh`: nothing that it said before counts."""
        if fresh:
            self.drop(replica)
        for one in told:
            if one.level not in self._levels:
                most = min(self._replicas * one.slots, self._most)
                self._levels[one.level] = PrefixIndex(most)
                self._seconds[one.level] = np.full(self._replicas, math.inf)
            self._seconds[one.level][replica] = one.seconds
            self._levels[one.level].apply(replica, Change(one.added, one.removed))

    def drop(self, replica: int) -> None:
        """As `PrefixIndex.drop`."""
        for index in self._levels.values():
            index.drop(replica)

    def sweep(self) -> bool:
        """As `PrefixIndex.sweep`."""
        return sum(index.sweep() for index in self._levels.values()) > 0

    def match(
        self, key: Callable[[int], int], blocks: int, held: Sequence[tuple[int, int]]
    ) -> list[Read]:
        """Who would read what of a prompt of so many `blocks`, whose prefix with block number `at`
        has this `key(at)`. `held`: what pools hold of it (`PrefixIndex.match`), behind which is
        read, at each level what those above it lack."""
        here = 0
        for _, replicas in held:
            here |= replicas
        ways = [Read(0, ~here), *(Read(count, replicas) for count, replicas in held)]
        for level, index in sorted(self._levels.items()):
            found = []
            for way in ways:
                rest = way.replicas
                for end, replicas in index.longest(key, blocks, way.end, rest):
                    read = (level, end - way.end)
                    found.append(Read(end, replicas, (*way.blocks, read)))
                    rest &= ~replicas
                if rest:
                    found.append(Read(way.end, rest, way.blocks))
            ways = found
        return [way for way in ways if way.blocks]

    def seconds(self, read: Read, which: int | np.ndarray) -> float | np.ndarray:
        """What reading takes, at one replica or at several."""
        times = [count * self._seconds[level][which] for level, count in read.blocks]
        found: float | np.ndarray = sum(times)
        return found


# Coming -------------------------------------------------------------------------------------------
#
# Requests that were sent, and prompts that are on their way.


_LOOKS = 64
"""So many prompts on their way are compared for each first block that they compute."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request under way. `seconds`: of computing its prompt, until its first token is told."""

    replica: int
    seconds: float
    tokens: int
    digests: np.ndarray
    known: int
    """Of `digests`, how many others had computed, or were to compute."""
    at: float
    due: float
    """When its first token should be there, whoever was preferred to it."""
    begun: bool = False


class Coming:
    """Prompts that are not computed yet, by the first block that each computes: whoever shares more
    of a prompt than its replica held shares that block. So a prompt costs what one block does."""

    def __init__(self) -> None:
        self._first: dict[int, dict[Hashable, Sent]] = {}
        self._places: Counter[int] = Counter()
        """Where in prompts these blocks are, and how many of them."""

    def __len__(self) -> int:
        return len(self._first)

    def add(self, request: Hashable, sent: Sent) -> None:
        """What the replica did not hold of it is computed there."""
        if sent.known < len(sent.digests):
            first = sent.digests.item(sent.known)
            if first not in self._first:
                self._first[first] = {}
                self._places[sent.known] += 1
            self._first[first][request] = sent

    def remove(self, request: Hashable, sent: Sent) -> None:
        """It is computed, or will not be."""
        if sent.known < len(sent.digests):
            first = sent.digests.item(sent.known)
            there = self._first[first]
            del there[request]
            if not there:
                del self._first[first]
                self._places[sent.known] -= 1
                if not self._places[sent.known]:
                    del self._places[sent.known]

    def match(self, digests: np.ndarray) -> dict[int, int]:
        """How many of a prompt's `digests` (uint64, the shortest prefix first) each replica will
        have computed for others; replicas that compute none of it are left out."""
        found: dict[int, int] = {}
        places = [place for place in self._places if place < len(digests)]
        for first in filter(self._first.__contains__, digests[places].tolist()):
            for sent in islice(self._first[first].values(), _LOOKS):
                shorter = min(len(digests), len(sent.digests))
                # Prefixes: where two are equal, so are all before them.
                count = int(np.count_nonzero(digests[:shorter] == sent.digests[:shorter]))
                found[sent.replica] = max(count, found.get(sent.replica, 0))
        return found


# Router -------------------------------------------------------------------------------------------


_PATIENCE, _LEEWAY = 4.0, 0.5
"""So many times its price, and so many seconds, may pass until a first token is late: others
overtake it where many wait."""


@dataclass(frozen=True)
class RouterConfig:
    """`block_size`: at which bounds replicas tell what they hold. `capacity`: tokens of a replica's
    KV pool, `cost` what its steps take. `spread`: how many times its computing a token counts that
    another replica has, where a pool is full: what is held twice leaves less room for other
    prefixes. `empty`: this part of `spread` counts where a pool is empty. `space_of`: what keys of
    blocks below the pools begin with (`prefix_keys`)."""

    replicas: int
    block_size: int
    capacity: int
    cost: StepCost
    spread: float = 8.0
    empty: float = 0.125
    most_entries: int = MOST_ENTRIES
    digest_key: bytes = b""
    space_of: Callable[[Hashable], bytes] = kv_space


class Router:
    """Knows what replicas hold, and what was sent to them and is not done.

    A replica's price for a request is the time until its first token there: the prompts before it
    and its own tokens that are not cached, both slowed by the rows that decode; by how much the
    first token that it owes is late; and, where the pool is full, the time until enough of it is
    free. Prompts on their way count as cached where they were sent: so requests that arrive
    together and share a prefix stay together, a program's branches among them. A prefix that many
    want makes its owner busy, until another one is cheaper, computes it and then holds it, too.
    What lies below a pool counts as computed in the time that reading it takes, if that is less.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._cost = config.cost
        self._digests = PrefixDigests(config.digest_key)
        blocks = config.replicas * config.capacity // config.block_size
        self._held = PrefixIndex(min(blocks, config.most_entries))
        self._below = BelowPools(config.replicas, config.most_entries)
        self._coming = Coming()
        self._sent: dict[Hashable, Sent] = {}
        count = config.replicas
        self._dead: list[int] = []
        self._queued = [0.0] * count
        """Seconds of prompts that are to be computed."""
        self._rows = [0] * count
        self._tokens = np.zeros(count)
        """Of requests under way."""
        self._free = np.zeros(count)
        """When what is queued should be computed."""
        self._blocks = [0] * count
        """That replicas said they hold."""
        self._slow = [1.0] * count
        """So much longer than alone a prompt takes."""
        self._spread = np.full(count, config.spread * config.empty)
        """By replica; what nobody holds yet is held once in any case."""
        self._each = 1 + self._spread
        """The price of a second of computing what another one holds."""
        self._served = np.zeros(count, np.int64)
        """Tokens sent in all: of two that are equally good, the one with less is taken."""
        self._owed: list[dict[Hashable, Sent]] = [{} for _ in range(count)]
        """Those without a first token, in the order in which they were sent."""
        self._due = np.full(count, np.inf)
        """When the first of these should have its first token."""
        self._all_due = np.inf
        """No first token should be there before."""
        self._duration = 1.0
        """Seconds from sending to the end, of late."""

    def heard(self, replica: int, change: Change, below: Sequence[Below] = ()) -> None:
        """What a replica's cache holds has changed, or what lies below it. Of a lost one nothing
        counts."""
        if replica not in self._dead:
            self._held.apply(replica, change)
            before = 0 if change.fresh else self._blocks[replica]
            blocks = before + len(change.added) - len(change.removed)
            if blocks != self._blocks[replica]:
                self._blocks[replica] = blocks
                self._price(replica)
            self._below.apply(replica, below, change.fresh)

    def learn(self, cost: StepCost) -> None:
        """What the steps of replicas were measured to take."""
        self._cost = cost

    def sweep(self) -> bool:
        """Take out some of what lost replicas held; to be called until it returns False."""
        more = self._held.sweep()
        return self._below.sweep() or more

    def __len__(self) -> int:
        """How many prefixes are known to be held."""
        return len(self._held)

    @property
    def known_below(self) -> int:
        """How many blocks are known to lie below pools."""
        return len(self._below)

    def route(
        self,
        request: Hashable,
        namespace: Hashable,
        tokens: np.ndarray,
        output: int,
        now: float,
        prefer: int | None = None,
        avoid: Sequence[int] = (),
    ) -> int:
        """The replica for a prompt (int32), of which about `output` tokens will be generated. Its
        first token and its end must be told. Of several that are equally good, the one to `prefer`
        is taken, and none of those to `avoid`, which are not all that are there. Raises ValueError
        when all replicas are lost."""
        if len(self._dead) == self._config.replicas:
            raise ValueError("all replicas are lost")
        size, length = self._config.block_size, len(tokens)
        digests = self._digests.at_bounds(namespace, tokens, size)
        held, coming = self._held.match(digests), self._coming.match(digests)
        price = self._each * self._prefill_seconds(length, 0)
        for count, replicas in held:
            which = _members(replicas)
            price[which] = self._each[which] * self._prefill_seconds(length, count * size)
        best = max(held[-1][0] if held else 0, max(coming.values(), default=0))
        once = self._prefill_seconds(length, best * size)
        reads = self._reads(namespace, tokens, held) if len(self._below) else ()
        for read in reads:
            which = _members(read.replicas)
            there = self._reading_seconds(length, read, which)
            once = min(once, float(np.min(there)))
            price[which] = np.minimum(price[which], self._each[which] * there)
        for replica, count in coming.items():
            soon = self._each.item(replica) * self._prefill_seconds(length, count * size)
            price[replica] = min(price.item(replica), soon)
        price -= self._spread * once
        price += np.maximum(self._free - now, 0.0)
        self._add_delays(price, now)
        most = self._tokens.item(self._tokens.argmax())
        if most + length + output > self._config.capacity:
            price += self._waiting(length + output)
        if self._dead or avoid:
            price[[*self._dead, *avoid]] = np.inf
        replica = self._cheapest(price, prefer)
        known = next((count for count, replicas in held if replicas >> replica & 1), 0)
        known = max(known, coming.get(replica, 0))
        taken = self._prefill_seconds(length, known * size)
        for read in reads:
            if read.replicas >> replica & 1:
                taken = min(taken, float(self._reading_seconds(length, read, replica)))
        free = max(self._free.item(replica), now) + taken * self._slow[replica]
        self._free[replica] = free
        wait = free - now
        due = now + _PATIENCE * wait + _LEEWAY
        sent = Sent(replica, taken, length + output, digests, known, now, due)
        self._sent[request] = sent
        self._owe(request, sent)
        self._coming.add(request, sent)
        self._queued[replica] += taken
        self._tokens[replica] += length + output
        self._renew(replica)
        self._served[replica] += length - known * size
        return replica

    def held(self, namespace: Hashable, tokens: np.ndarray) -> list[tuple[int, int]]:
        """How many whole blocks of `tokens` (int32) replicas hold: see `PrefixIndex.match`."""
        size = self._config.block_size
        return self._held.match(self._digests.at_bounds(namespace, tokens, size))

    def first_token(self, request: Hashable, now: float) -> None:
        """The prompt is computed, and what is cached of it was told before."""
        sent = self._sent[request]
        self._rows[sent.replica] += 1
        self._renew(sent.replica)
        self._computed(request, sent, now)

    def ended(self, request: Hashable, now: float) -> None:
        sent = self._sent.pop(request)
        if sent.begun:
            self._rows[sent.replica] -= 1
        else:
            self._computed(request, sent, now)
            self._leave_to_others(sent)
        self._tokens[sent.replica] -= sent.tokens
        self._renew(sent.replica)
        self._duration += 0.05 * (now - sent.at - self._duration)

    def lost(self, replica: int) -> list[Hashable]:
        """A replica is gone: nothing is sent there any more. Returns its requests, which can be
        routed again."""
        if replica in self._dead:
            return []
        self._dead.append(replica)
        self._held.drop(replica)
        self._below.drop(replica)
        gone = [request for request, sent in self._sent.items() if sent.replica == replica]
        for request in gone:
            sent = self._sent.pop(request)
            if not sent.begun:
                self._coming.remove(request, sent)
        self._queued[replica] = self._tokens[replica] = self._rows[replica] = 0
        self._blocks[replica] = 0
        self._price(replica)
        self._owed[replica].clear()
        self._due[replica] = np.inf
        self._free[replica] = 0.0
        self._renew(replica)
        return gone

    def back(self, replica: int) -> None:
        """A replica that was lost is there again, with an empty cache."""
        self._dead.remove(replica)

    def _leave_to_others(self, gone: Sent) -> None:
        """It ended before it was computed: those behind it that share its prompt compute that."""
        if gone.known == len(gone.digests):
            return
        first = gone.digests.item(gone.known)
        for request, other in self._owed[gone.replica].items():
            if other.known > gone.known and other.digests.item(gone.known) == first:
                self._coming.remove(request, other)
                other.known = gone.known
                self._coming.add(request, other)

    def _owe(self, request: Hashable, sent: Sent) -> None:
        owed = self._owed[sent.replica]
        if not owed:
            self._due[sent.replica] = sent.due
            self._all_due = min(self._all_due, sent.due)
        owed[request] = sent

    def _computed(self, request: Hashable, sent: Sent, now: float) -> None:
        """Or never will be. The next prompt there begins now."""
        owed = self._owed[sent.replica]
        del owed[request]
        self._due[sent.replica] = next(iter(owed.values())).due if owed else np.inf
        self._coming.remove(request, sent)
        sent.begun = True
        queued = self._queued[sent.replica] = max(self._queued[sent.replica] - sent.seconds, 0.0)
        self._free[sent.replica] = now + queued * self._slow[sent.replica]

    def _prefill_seconds(self, length: int, cached: int) -> float:
        """Of a prompt alone; its last token is computed in any case."""
        cost, rest = self._cost, max(length - cached, 1)
        each = cost.prefill + cost.step / cost.max_step_tokens
        return rest * (each + cost.pair * (length + cached) / 2)

    def _reads(
        self, namespace: Hashable, tokens: np.ndarray, held: list[tuple[int, int]]
    ) -> list[Read]:
        size = self._config.block_size
        keys = LazyKeys(self._config.space_of(namespace), tokens, size)
        return self._below.match(keys.item, len(tokens) // size, held)

    def _reading_seconds(
        self, length: int, read: Read, which: int | np.ndarray
    ) -> float | np.ndarray:
        """Of a prompt of which some is read first: by replica."""
        rest = self._prefill_seconds(length, read.end * self._config.block_size)
        return rest + self._below.seconds(read, which)

    def _cheapest(self, price: np.ndarray, prefer: int | None) -> int:
        """Of those that are equally good, the one to `prefer`, or to which less was sent."""
        first = int(price.argmin())
        most = price.item(first) * (1 + 1e-9)
        if prefer is not None and price[prefer] <= most:
            return prefer
        equal = (price <= most).nonzero()[0]
        return first if len(equal) == 1 else int(equal[self._served[equal].argmin()])

    def _renew(self, replica: int) -> None:
        """Its rows or their tokens have changed. Every step of prompts has the rows, too: so much
        longer than alone a prompt takes."""
        slow, rows = 1.0, self._rows[replica]
        if rows:
            cost = self._cost
            beside = rows * cost.decode + cost.context * self._tokens.item(replica)
            slow += beside / (cost.step + cost.prefill * cost.max_step_tokens)
        if slow != self._slow[replica]:
            self._slow[replica] = slow
            self._each[replica] = slow + self._spread.item(replica)

    def _price(self, replica: int) -> None:
        """It holds more or less. What comes into an empty pool takes no room that other prefixes
        have."""
        config = self._config
        full = min(self._blocks[replica] * config.block_size / config.capacity, 1.0)
        spread = config.spread * (config.empty + (1 - config.empty) * full)
        self._spread[replica] = spread
        self._each[replica] = self._slow[replica] + spread

    def _add_delays(self, price: np.ndarray, now: float) -> None:
        """By how much the first tokens that replicas owe are late."""
        if now > self._all_due:
            self._all_due = float(np.minimum.reduce(self._due))
            if now > self._all_due:
                price += np.maximum(now - self._due, 0.0)

    def _waiting(self, tokens: int) -> np.ndarray:
        """Seconds until the pool has room for so many more tokens: as many are given back in the
        time that a request takes as requests hold now."""
        over = np.maximum(self._tokens + (tokens - self._config.capacity), 0)
        return self._duration * over / np.maximum(self._tokens, 1)


def _members(replicas: int) -> int | np.ndarray:
    """The numbers of the bits that are set, of which there is one at least."""
    if not replicas & (replicas - 1):
        return replicas.bit_length() - 1
    if replicas.bit_count() > 8:
        raw = np.frombuffer(replicas.to_bytes(-(-replicas.bit_length() // 8), "little"), np.uint8)
        return np.unpackbits(raw, bitorder="little").view(bool).nonzero()[0]
    found = []
    while replicas:
        found.append(replicas.bit_length() - 1)
        replicas ^= 1 << found[-1]
    return np.array(found)
