"""Sends each request to the replica where it costs least."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache.digest import PrefixDigests
from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.step_cost import StepCost
from rootlace.runtime.routing.index import MOST_ENTRIES, PrefixIndex

_PATIENCE, _LEEWAY = 4.0, 0.5
"""So many times its price, and so many seconds, may pass until a first token is late: others
overtake it where many wait."""


@dataclass(frozen=True)
class RouterConfig:
    """`block_size`: at which bounds replicas tell what they hold. `capacity`: tokens of a replica's
    KV pool, `cost` what its steps take. `spread`: how many times its computing a token counts that
    another replica has: what is held twice leaves less room for other prefixes."""

    replicas: int
    block_size: int
    capacity: int
    cost: StepCost
    spread: float = 8.0
    most_entries: int = MOST_ENTRIES
    digest_key: bytes = b""


@dataclass
class _Sent:
    """A request under way. `seconds`: of computing its prompt, until its first token is told."""

    replica: int
    seconds: float
    tokens: int
    digests: list[int]
    known: int
    """Of `digests`, how many others had computed, or were to compute."""
    at: float
    due: float
    """When its first token should be there, whoever was preferred to it."""
    begun: bool = False

    @property
    def coming(self) -> list[int]:
        """Digests of what the replica did not hold."""
        return self.digests[self.known :]


class Router:
    """Knows what replicas hold, and what was sent to them and is not done.

    A replica's price for a request is the time until its first token there: the prompts before it
    and its own tokens that are not cached, both slowed by the rows that decode; by how much the
    first token that it owes is late; and, where the pool is full, the time until enough of it is
    free. Prompts on their way count as cached where they were sent: so requests that arrive
    together and share a prefix stay together, a program's branches among them. A prefix that many
    want makes its owner busy, until another one is cheaper, computes it and then holds it, too.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._cost = config.cost
        self._digests = PrefixDigests(config.digest_key)
        self._held = PrefixIndex(config.most_entries)
        self._coming = PrefixIndex(config.most_entries)
        self._sent: dict[Hashable, _Sent] = {}
        count = config.replicas
        self._dead: list[int] = []
        self._queued = np.zeros(count)
        """Seconds of prompts that are to be computed."""
        self._rows = np.zeros(count, np.int64)
        self._tokens = np.zeros(count)
        """Of requests under way."""
        self._slow = np.ones(count)
        """How many times as long as alone a prompt takes beside the rows that decode."""
        self._served = np.zeros(count, np.int64)
        """Tokens sent in all: of two that are equally good, the one with less is taken."""
        self._owed: list[dict[Hashable, _Sent]] = [{} for _ in range(count)]
        """Those without a first token, in the order in which they were sent."""
        self._due = np.full(count, np.inf)
        """When the first of these should have its first token."""
        self._duration = 1.0
        """Seconds from sending to the end, of late."""

    def heard(self, replica: int, change: Change) -> None:
        """What a replica's cache holds has changed. Of a lost one nothing counts."""
        if replica not in self._dead:
            self._held.apply(replica, change)

    def learn(self, cost: StepCost) -> None:
        """What the steps of replicas were measured to take."""
        self._cost = cost

    def sweep(self) -> bool:
        """Take out some of what lost replicas held; to be called until it returns False."""
        return self._held.sweep() | self._coming.sweep()

    def __len__(self) -> int:
        """How many prefixes are known to be held."""
        return len(self._held)

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
        digests = self._digests.of_all(namespace, tokens)[size::size].tolist()
        held = self._held.match(digests, self._coming)
        seconds = np.full(self._config.replicas, self._prefill_seconds(length, 0))
        for count, replicas in held:
            seconds[_members(replicas, len(seconds))] = self._prefill_seconds(length, count * size)
        wait = (self._queued + seconds) * self._slow
        price = wait + self._config.spread * seconds
        price += np.maximum(now - self._due, 0.0)
        if self._tokens.max() + length + output > self._config.capacity:
            price += self._waiting(length + output)
        if self._dead or avoid:
            price[[*self._dead, *avoid]] = np.inf
        best = np.flatnonzero(price <= price.min() * (1 + 1e-9))
        if prefer is None or prefer not in best:
            prefer = best[np.argmin(self._served[best])] if len(best) > 1 else best[0]
        replica = int(prefer)
        known = next((count for count, replicas in held if replicas >> replica & 1), 0)
        taken = float(seconds[replica])
        due = now + _PATIENCE * float(wait[replica]) + _LEEWAY
        sent = _Sent(replica, taken, length + output, digests, known, now, due)
        self._sent[request] = sent
        self._owe(request, sent)
        self._coming.add(replica, sent.coming)
        self._queued[replica] += taken
        self._tokens[replica] += length + output
        self._served[replica] += length - known * size
        return replica

    def held(self, namespace: Hashable, tokens: np.ndarray) -> list[tuple[int, int]]:
        """How many whole blocks of `tokens` (int32) replicas hold: see `PrefixIndex.match`."""
        size = self._config.block_size
        digests = self._digests.of_all(namespace, tokens)[size::size]
        return self._held.match(digests.tolist())

    def first_token(self, request: Hashable) -> None:
        """The prompt is computed, and what is cached of it was told before."""
        sent = self._sent[request]
        self._computed(request, sent)
        self._rows[sent.replica] += 1
        self._slow_down(sent.replica)

    def ended(self, request: Hashable, now: float) -> None:
        sent = self._sent.pop(request)
        if sent.begun:
            self._rows[sent.replica] -= 1
        else:
            self._computed(request, sent)
            self._leave_to_others(sent)
        self._tokens[sent.replica] -= sent.tokens
        self._slow_down(sent.replica)
        self._duration += 0.05 * (now - sent.at - self._duration)

    def lost(self, replica: int) -> list[Hashable]:
        """A replica is gone: nothing is sent there any more. Returns its requests, which can be
        routed again."""
        if replica in self._dead:
            return []
        self._dead.append(replica)
        self._held.drop(replica)
        self._coming.drop(replica)
        gone = [request for request, sent in self._sent.items() if sent.replica == replica]
        for request in gone:
            del self._sent[request]
        self._queued[replica] = self._rows[replica] = self._tokens[replica] = 0
        self._owed[replica].clear()
        self._due[replica] = np.inf
        self._slow_down(replica)
        return gone

    def back(self, replica: int) -> None:
        """A replica that was lost is there again, with an empty cache."""
        self._dead.remove(replica)

    def _leave_to_others(self, gone: _Sent) -> None:
        """It ended before it was computed: those behind it that share its prompt compute that."""
        if not gone.coming:
            return
        for other in self._sent.values():
            if other.replica != gone.replica or other.begun or other.known <= gone.known:
                continue
            if other.digests[gone.known] == gone.digests[gone.known]:
                other.known = gone.known
                self._coming.add(other.replica, other.coming)

    def _owe(self, request: Hashable, sent: _Sent) -> None:
        owed = self._owed[sent.replica]
        if not owed:
            self._due[sent.replica] = sent.due
        owed[request] = sent

    def _computed(self, request: Hashable, sent: _Sent) -> None:
        owed = self._owed[sent.replica]
        del owed[request]
        self._due[sent.replica] = next(iter(owed.values())).due if owed else np.inf
        self._coming.remove(sent.replica, sent.coming)
        sent.begun = True
        self._queued[sent.replica] = max(self._queued[sent.replica] - sent.seconds, 0.0)

    def _prefill_seconds(self, length: int, cached: int) -> float:
        """Of a prompt alone; its last token is computed in any case."""
        cost, rest = self._cost, max(length - cached, 1)
        each = cost.prefill + cost.step / cost.max_step_tokens
        return rest * (each + cost.pair * (length + cached) / 2)

    def _slow_down(self, replica: int) -> None:
        """Its rows, or their tokens, have changed: every step of prompts has them, too."""
        cost, rows = self._cost, int(self._rows[replica])
        beside = rows * cost.decode + cost.context * float(self._tokens[replica]) * (rows > 0)
        self._slow[replica] = 1 + beside / (cost.step + cost.prefill * cost.max_step_tokens)

    def _waiting(self, tokens: int) -> np.ndarray:
        """Seconds until the pool has room for so many more tokens: as many are given back in the
        time that a request takes as requests hold now."""
        over = np.maximum(self._tokens + (tokens - self._config.capacity), 0)
        return self._duration * over / np.maximum(self._tokens, 1)


def _members(replicas: int, count: int) -> np.ndarray:
    """The numbers of the bits that are set."""
    if not replicas & (replicas - 1):
        return np.array([replicas.bit_length() - 1])
    raw = np.frombuffer(replicas.to_bytes(-(-count // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))
