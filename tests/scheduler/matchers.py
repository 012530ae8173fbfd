"""Constraints over bare token ids, made up: they force runs of tokens, and may take tokens back."""

import hashlib
from functools import cache
from itertools import count

import numpy as np

from rootlace.runtime.contracts.matcher import UNKNOWN, Place
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SteppedAutomaton


class Plain:
    """Matcher that forces nothing and takes nothing back."""

    place = UNKNOWN
    free = False
    can_rollback = False

    def mask_row(self) -> MaskRow | None:
        return None

    def prepare_mask(self) -> None:
        raise AssertionError("there is no row")

    def automaton(self) -> AutomatonState | None:
        return None

    def forced_tokens(self) -> list[int]:
        return []

    def ignores(self, token_id: int) -> bool:
        return False

    def settled(self) -> int:
        return 0

    def rollback_refused(self) -> int | None:
        return None

    def error(self) -> str:
        return "refused"


class Digits(Plain):
    """Allows `length` tokens below 10 and then nothing."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[int] = []

    def fill_bitmask(self, out: np.ndarray) -> None:
        out[:] = 0
        out[0] = (1 << 10) - 1

    def advance(self, token_id: int) -> bool:
        self.seen.append(token_id)
        return token_id < 10

    def is_finished(self) -> bool:
        return len(self.seen) >= self.length


class Script(Plain):
    """What may follow depends on a hash of (seed, tokens so far); `length` tokens complete it.

    About `forcing` of 10 places allow one token only. Of some places is known beforehand that they
    are not the end, or that nothing is forced there. With `checking`, some tokens that the mask
    allows are refused, and excluded there from then on; at most `tries` of them.
    """

    def __init__(
        self,
        seed: int,
        length: int,
        vocab: int,
        forcing: int = 5,
        checking: bool = False,
        tries: int = 8,
    ) -> None:
        self.seed, self.length, self.vocab = seed, length, vocab
        self.forcing, self.checking, self.tries = forcing, checking, tries
        self.can_rollback = checking
        self.seen: list[int] = []
        self.excluded: dict[tuple[int, ...], set[int]] = {}
        self.refused = -1

    @property
    def place(self) -> Place:  # type: ignore[override]
        first, second = self._hash("known", self.seen)[:2]
        return Place(
            unfinished=first % 4 > 0 and len(self.seen) < self.length,
            unforced=second % 4 > 0 and not self.forced_tokens(),
        )

    def options(self, seen: list[int]) -> list[int]:
        first, second, third = self._hash("options", seen)[:3]
        if first % 10 < self.forcing:
            allowed = [second % self.vocab]
        else:
            allowed = [t for t in range(self.vocab) if third >> (t % 8) & 1] or [
                second % self.vocab
            ]
        return [t for t in allowed if t not in self.excluded.get(tuple(seen), ())]

    def fill_bitmask(self, out: np.ndarray) -> None:
        out[:] = 0
        for token in self.options(self.seen):
            out[token // 32] |= np.int32(1) << np.int32(token % 32)

    def advance(self, token_id: int) -> bool:
        assert len(self.seen) < self.length, "asked beyond its end"
        bad = self.checking and self._hash("check", [*self.seen, token_id])[0] % 4 == 0
        if bad or token_id not in self.options(self.seen):
            self.refused = token_id
            return False
        self.seen.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        del self.seen[len(self.seen) - count :]
        self.refused = -1

    def is_finished(self) -> bool:
        return len(self.seen) >= self.length

    def forced_tokens(self) -> list[int]:
        run: list[int] = []
        most = 1 + self._hash("run", self.seen)[0] % 4
        while len(run) < most and len(self.seen) + len(run) < self.length:
            allowed = self.options(self.seen + run)
            if len(allowed) != 1:
                break
            run.append(allowed[0])
        return run

    def rollback_refused(self) -> int | None:
        self.tries -= 1
        if self.tries < 0:
            return None
        undone = 0
        self._exclude(self.refused)
        while not self.options(self.seen):
            if not self.seen:
                return None
            self._exclude(self.seen.pop())
            undone += 1
        return undone

    def error(self) -> str:
        return f"no {self.refused} here" if self.refused >= 0 else ""

    def _exclude(self, token: int) -> None:
        self.excluded.setdefault(tuple(self.seen), set()).add(token)

    def _hash(self, *what: object) -> bytes:
        return hashlib.sha256(repr((self.seed, *what)).encode()).digest()


class Asked(Script):
    """Nothing is known of its places beforehand."""

    place = UNKNOWN


_keys = count()


@cache
def layers(seed: int, length: int, vocab: int, forcing: int) -> SteppedAutomaton:
    """An automaton that `length` tokens complete: three states per place, the last have no next.

    About `forcing` of 10 states allow one token only.
    """
    dice = np.random.default_rng([seed, length, vocab, forcing])
    states = 3 * (length + 1)
    allowed = dice.random((states, vocab)) < 0.6
    forced = dice.integers(0, 10, states) < forcing
    allowed[forced | ~allowed.any(1)] = False
    allowed[np.arange(states), dice.integers(0, vocab, states)] |= ~allowed.any(1)
    following = 3 * (np.arange(states)[:, None] // 3 + 1) + dice.integers(0, 3, (states, vocab))
    allowed[-3:] = False
    masks = np.zeros((states, -(-vocab // 32)), np.int32)
    for state, token in np.argwhere(allowed).tolist():
        masks[state, token // 32] |= np.int32(1) << np.int32(token % 32)
    distinct, mask_of = np.unique(masks, axis=0, return_inverse=True)
    return SteppedAutomaton(
        key=next(_keys),
        token_class=np.arange(vocab, dtype=np.int32),
        next_state=np.where(allowed, following, -1).astype(np.int32),
        mask_of=mask_of.reshape(-1).astype(np.int32),
        masks=distinct,
    )


class Stepped(Plain):
    """An automaton of `layers`, on the host; in about `hidden` of 10 states it is not offered."""

    def __init__(
        self, seed: int, length: int, vocab: int, forcing: int = 5, hidden: int = 0
    ) -> None:
        self.table = layers(seed, length, vocab, forcing)
        self.length, self.hidden = length, hidden
        self.state = 0
        self.before: list[int] = []
        self.seen: list[int] = []

    def automaton(self) -> AutomatonState | None:
        if self.state * 7 % 10 < self.hidden:
            return None
        return AutomatonState(self.table, self.state)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out[:] = self.table.masks[self.table.mask_of[self.state]]

    def advance(self, token_id: int) -> bool:
        following = int(self.table.next_state[self.state, token_id])
        if following < 0:
            return False
        self.before.append(self.state)
        self.state = following
        self.seen.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self.state = self.before.pop()
            self.seen.pop()

    def error(self) -> str:
        return ""

    def is_finished(self) -> bool:
        return self.state >= 3 * self.length

    def forced_tokens(self) -> list[int]:
        (allowed,) = np.nonzero(self.table.next_state[self.state] >= 0)
        return allowed.tolist() if len(allowed) == 1 else []
