"""Sends each request to the replica of least cost.

 price(replica) = prompts before the request + its uncached tokens, slowed by decode rows
                + delay of first tokens owed + wait for room in a full pool

Sections: offload levels, requests in flight, router.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from rootlace.runtime.cache.journal import TOLD_BLOCKS, Change, LazyKeys, PrefixDigests, most_blocks
from rootlace.runtime.contracts.messages import Below, kv_space
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.routing.index import MOST_ENTRIES, PrefixIndex

# Offload levels -----------------------------------------------------------------------------------


class Read(msgspec.Struct, frozen=True):
    """Reads of a prompt's blocks before number `end` by `replicas` (bits): (level, count) pairs."""

    end: int
    replicas: int
    blocks: tuple[tuple[int, int], ...] = ()


class BelowPools:
    """Blocks in the offload levels of all replicas, and read times.

    One table per level, by the keys that engines report (`Below`): as many blocks as `replicas`
    have there, at most `limit`.
    """

    def __init__(self, replicas: int, limit: int) -> None:
        self._replicas = replicas
        self._limit = limit
        self._levels: dict[int, PrefixIndex] = {}
        self._seconds: dict[int, np.ndarray] = {}
        """Seconds per block, by replica."""

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def apply(self, replica: int, reports: Sequence[Below], fresh: bool) -> None:
        """Take in a replica's report; `fresh`: earlier reports are void."""
        if fresh:
            self.drop(replica)
        for one in reports:
            if one.level not in self._levels:
                most = min(self._replicas * one.slots, self._limit)
                self._levels[one.level] = PrefixIndex(most)
                self._seconds[one.level] = np.full(self._replicas, math.inf)
            self._seconds[one.level][replica] = one.seconds
            self._levels[one.level].apply(replica, Change(one.added, one.removed))

    def drop(self, replica: int) -> None:
        """See `PrefixIndex.drop`."""
        for index in self._levels.values():
            index.drop(replica)

    def sweep(self) -> bool:
        """See `PrefixIndex.sweep`."""
        return sum(index.sweep() for index in self._levels.values()) > 0

    def match(
        self, key: Callable[[int], int], blocks: int, held: Sequence[tuple[int, int]]
    ) -> list[Read]:
        """Which replicas would read which blocks of a prompt.

        The prompt has `blocks` blocks, and its prefix up to block `at` has the key `key(at)`.
        `held`: blocks in pools as they are told (`Router.held`); reads begin behind these, at each
        level behind the levels above.
        """
        here = 0
        for _, replicas in held:
            here |= replicas
        ways = [Read(0, ~here), *(Read(count, replicas) for count, replicas in held)]
        for level, index in sorted(self._levels.items()):
            reads = []
            for before in ways:
                rest = before.replicas
                # A pool may hold more blocks than reported; a level need not.
                first = before.end if before.blocks else most_blocks(before.end)
                for end, replicas in index.longest(key, blocks, first, rest):
                    read = (level, end - before.end)
                    reads.append(Read(end, replicas, (*before.blocks, read)))
                    rest &= ~replicas
                if rest:
                    reads.append(Read(before.end, rest, before.blocks))
            ways = reads
        return [before for before in ways if before.blocks]

    def seconds(self, read: Read, which: int | np.ndarray) -> float | np.ndarray:
        """Seconds to read, at one replica or at several."""
        times = [count * self._seconds[level][which] for level, count in read.blocks]
        seconds: float | np.ndarray = sum(times)
        return seconds


# Requests in flight -------------------------------------------------------------------------------


_LOOKS = 64
"""Prompts in flight compared for each first block computed."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request in flight; `seconds`: prefill time until its first token is reported."""

    replica: int
    seconds: float
    tokens: int
    digests: np.ndarray
    known: int
    """Count of `digests` that other requests had computed, or were to compute."""
    at: float
    due: float
    """Time of the expected first token, whichever requests overtake this one."""
    begun: bool = False


class Coming:
    """Prompts not computed yet, by the first block that each computes.

    A prompt that shares more than the replica's cached prefix shares that block. So a prompt costs
    one entry.
    """

    def __init__(self) -> None:
        self._first: dict[int, dict[Hashable, Sent]] = {}
        self._places: Counter[int] = Counter()
        """Place of each first block among its prompt's digests -> count."""

    def __len__(self) -> int:
        return len(self._first)

    def add(self, request: Hashable, sent: Sent) -> None:
        """Add a sent request, with uncached blocks that its replica computes."""
        if sent.known < len(sent.digests):
            first = sent.digests.item(sent.known)
            if first not in self._first:
                self._first[first] = {}
                self._places[sent.known] += 1
            self._first[first][request] = sent

    def remove(self, request: Hashable, sent: Sent) -> None:
        """Remove a request that was computed, or will not be."""
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
        """Count of a prompt's `digests` (uint64, shortest first) that each replica is computing.

        Replicas that compute none of the prompt are left out.
        """
        counts: dict[int, int] = {}
        places = [place for place in self._places if place < len(digests)]
        for first in filter(self._first.__contains__, digests[places].tolist()):
            for sent in islice(self._first[first].values(), _LOOKS):
                shorter = min(len(digests), len(sent.digests))
                # Digests are of prefixes: where two are equal, so are all before them.
                count = int(np.count_nonzero(digests[:shorter] == sent.digests[:shorter]))
                counts[sent.replica] = max(count, counts.get(sent.replica, 0))
        return counts


# Router -------------------------------------------------------------------------------------------


_PATIENCE, _LEEWAY = 4.0, 0.5
"""Bound on a first token's delay: a multiple of its price, plus seconds.

Later requests overtake it in long queues.
"""


EMPTY = 0.125
"""`RouterConfig.empty`, if not stated."""


class RouterConfig(msgspec.Struct, frozen=True):
    """Configuration of a `Router`.

    `block_size`: block of the reported prefixes. `capacity`: tokens of a replica's KV pool. `cost`:
    cost of its steps. `spread`: weight of recomputing a token that another replica has, with a full
    pool: a duplicate leaves less room for other prefixes. `empty`: part of `spread` that counts
    with an empty pool. `space_of`: prefix of the keys of offloaded blocks (`prefix_keys`).
    """

    replicas: int
    block_size: int
    capacity: int
    cost: StepCost
    spread: float = 8.0
    empty: float = EMPTY
    most_entries: int = MOST_ENTRIES
    digest_key: bytes = b""
    space_of: Callable[[Hashable], bytes] = kv_space


class Router:
    """Knows the replicas' caches, and the requests in flight.

    A replica's price for a request is the time until its first token there. The parts: the prompts
    before the request and its uncached tokens, both slowed by decode rows; the delay of first
    tokens that the replica owes; and with a full pool the wait for room.

    Prompts in flight count as cached where they were sent. So requests that arrive together with a
    shared prefix stay together, a program's branches among them. A popular prefix makes its replica
    busy, until another replica is cheaper, computes the prefix and then holds it, too. Offloaded
    blocks count as computed in the time of reading, if that is less.
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
        """Seconds of queued prefill."""
        self._rows = [0] * count
        self._tokens = np.zeros(count)
        """Tokens of requests in flight."""
        self._free = np.zeros(count)
        """Time when queued prefill should be done."""
        self._blocks = [0] * count
        """Blocks that the replica reported."""
        self._slow = np.ones(count)
        """Slowdown of prefill by decode rows."""
        self._spread = np.full(count, config.spread * config.empty)
        """Weight of duplicates, by replica; a new prefix is held once in any case."""
        self._served = np.zeros(count, np.int64)
        """Tokens sent in all, which break ties."""
        self._owed: list[dict[Hashable, Sent]] = [{} for _ in range(count)]
        """Requests without a first token, in the order sent."""
        self._due = np.full(count, np.inf)
        """By replica: due time of its first request in `_owed`."""
        self._all_due = np.inf
        """The earliest due time of all."""
        self._duration = 1.0
        """Recent seconds from sending to the end."""

    def heard(self, replica: int, change: Change, below: Sequence[Below] = ()) -> None:
        """Take in a report on a replica's cache or offload levels; ignored for a lost replica."""
        if replica not in self._dead:
            self._held.apply(replica, change)
            if change.blocks is not None and change.blocks != self._blocks[replica]:
                self._blocks[replica] = change.blocks
                self._price(replica)
            if below or change.fresh:
                self._below.apply(replica, below, change.fresh)

    def learn(self, cost: StepCost) -> None:
        """Take in measured costs of the replicas' steps."""
        self._cost = cost

    def sweep(self) -> bool:
        """Remove some entries of lost replicas; call until it returns False."""
        more = self._held.sweep()
        return self._below.sweep() or more

    def __len__(self) -> int:
        """Count of prefixes known to be cached."""
        return len(self._held)

    @property
    def known_below(self) -> int:
        """Count of blocks known in offload levels."""
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
        """Return the replica for a prompt (int32), with about `output` tokens to generate.

        The caller reports the first token and the end. Ties go to `prefer`. Replicas of `avoid`,
        which are not all replicas, are excluded. Raises ValueError when all replicas are lost.
        """
        if len(self._dead) == self._config.replicas:
            raise ValueError("all replicas are lost")
        length = len(tokens)
        digests = self._digests.reported(namespace, tokens, self._config.block_size)
        held, coming = self._held.match(digests), self._coming.match(digests)
        seconds = np.full(self._config.replicas, self._prefill_seconds(length, 0))
        for count, replicas in held:
            seconds[_members(replicas)] = self._prefill_seconds(length, self._tokens_of(count))
        for read in self._reads(namespace, tokens, held) if len(self._below) else ():
            which = _members(read.replicas)
            seconds[which] = np.minimum(seconds[which], self._reading_seconds(length, read, which))
        for replica, count in coming.items():
            soon = self._prefill_seconds(length, self._tokens_of(count))
            seconds[replica] = min(seconds.item(replica), soon)
        price = self._slow * seconds
        price += self._spread * (seconds - seconds.item(seconds.argmin()))
        price += np.maximum(self._free - now, 0.0)
        self._add_delays(price, now)
        busiest = self._tokens.item(self._tokens.argmax())
        if busiest + length + output > self._config.capacity:
            price += self._waiting(length + output)
        if self._dead or avoid:
            price[[*self._dead, *avoid]] = np.inf
        replica = self._cheapest(price, prefer)
        known = next((count for count, replicas in held if replicas >> replica & 1), 0)
        known = max(known, coming.get(replica, 0))
        taken = seconds.item(replica)
        free = max(self._free.item(replica), now) + taken * self._slow.item(replica)
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
        self._served[replica] += length - self._tokens_of(known)
        return replica

    def held(self, namespace: Hashable, tokens: np.ndarray) -> list[tuple[int, int]]:
        """Count of full blocks of `tokens` (int32) that replicas hold, at most 1/32 too few: see
        `PrefixIndex.match`."""
        digests = self._digests.reported(namespace, tokens, self._config.block_size)
        return [(TOLD_BLOCKS[count], replicas) for count, replicas in self._held.match(digests)]

    def first_token(self, request: Hashable, now: float) -> None:
        """Note that the prompt is computed; its cached prefixes were reported before."""
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
        """Exclude a lost replica; return its requests, which can be routed again."""
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
        """Include a returned replica, with an empty cache."""
        self._dead.remove(replica)

    def _leave_to_others(self, gone: Sent) -> None:
        """Cancelled before prefill: charge its prefix to the next queued request that shares it."""
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
        """Note that a prompt was computed, or never will be; the next prefill starts now."""
        owed = self._owed[sent.replica]
        del owed[request]
        self._due[sent.replica] = next(iter(owed.values())).due if owed else np.inf
        self._coming.remove(request, sent)
        sent.begun = True
        queued = self._queued[sent.replica] = max(self._queued[sent.replica] - sent.seconds, 0.0)
        self._free[sent.replica] = now + queued * self._slow.item(sent.replica)

    def _tokens_of(self, count: int) -> int:
        """Tokens of a prompt's prefix that has the digest `count`, from 1 on."""
        return TOLD_BLOCKS[count] * self._config.block_size

    def _prefill_seconds(self, length: int, cached: int) -> float:
        """Seconds to prefill one prompt alone; its last token is computed in any case."""
        cost, rest = self._cost, max(length - cached, 1)
        each = cost.prefill + cost.step / cost.max_step_tokens
        return rest * (each + cost.pair * (length + cached) / 2)

    def _reads(
        self, namespace: Hashable, tokens: np.ndarray, held: list[tuple[int, int]]
    ) -> list[Read]:
        size = self._config.block_size
        keys = LazyKeys(self._config.space_of(namespace), tokens, size)
        blocks = [(TOLD_BLOCKS[count], replicas) for count, replicas in held]
        return self._below.match(keys.item, len(tokens) // size, blocks)

    def _reading_seconds(
        self, length: int, read: Read, which: int | np.ndarray
    ) -> float | np.ndarray:
        """Seconds to prefill a prompt after the reads of `read`, by replica."""
        rest = self._prefill_seconds(length, read.end * self._config.block_size)
        return rest + self._below.seconds(read, which)

    def _cheapest(self, price: np.ndarray, prefer: int | None) -> int:
        """Return the cheapest replica; of equals `prefer`, or the one sent the fewest tokens."""
        first = int(price.argmin())
        limit = price.item(first) * (1 + 1e-9)
        if prefer is not None and price[prefer] <= limit:
            return prefer
        equal = (price <= limit).nonzero()[0]
        return first if len(equal) == 1 else int(equal[self._served[equal].argmin()])

    def _renew(self, replica: int) -> None:
        """Update the slowdown of prefill after a change of decode rows or their tokens.

        Every prefill step has the decode rows, too.
        """
        slow, rows = 1.0, self._rows[replica]
        if rows:
            cost = self._cost
            beside = rows * cost.decode + cost.context * self._tokens.item(replica)
            slow += beside / (cost.step + cost.prefill * cost.max_step_tokens)
        self._slow[replica] = slow

    def _price(self, replica: int) -> None:
        """Update the price of duplicates after a change of the replica's blocks.

        Blocks in an empty pool take no room from other prefixes.
        """
        config = self._config
        full = min(self._blocks[replica] * config.block_size / config.capacity, 1.0)
        self._spread[replica] = config.spread * (config.empty + (1 - config.empty) * full)

    def _add_delays(self, price: np.ndarray, now: float) -> None:
        """Add the delays of first tokens that replicas owe."""
        if now > self._all_due:
            self._all_due = float(np.minimum.reduce(self._due))
            if now > self._all_due:
                price += np.maximum(now - self._due, 0.0)

    def _waiting(self, tokens: int) -> np.ndarray:
        """Seconds until the pool has room for `tokens` more tokens.

        Requests release, per request duration, as many tokens as they hold now.
        """
        over = np.maximum(self._tokens + (tokens - self._config.capacity), 0)
        return self._duration * over / np.maximum(self._tokens, 1)


def _members(replicas: int) -> int | np.ndarray:
    """Return the numbers of the set bits, of which there is at least one."""
    if not replicas & (replicas - 1):
        return replicas.bit_length() - 1
    if replicas.bit_count() > 8:
        raw = np.frombuffer(replicas.to_bytes(-(-replicas.bit_length() // 8), "little"), np.uint8)
        return np.unpackbits(raw, bitorder="little").view(bool).nonzero()[0]
    members = []
    while replicas:
        members.append(replicas.bit_length() - 1)
        replicas ^= 1 << members[-1]
    return np.array(members)
