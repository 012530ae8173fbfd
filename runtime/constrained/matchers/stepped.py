"""Whole automata over tokens, for a device that masks and steps by itself.

Lazy automata are for the host, which asks for one state at a time. A device has to know all states,
their masks and what each token does to each of them before it is asked. Of regular constraints of
modest size that is a table of states and classes of tokens (`token_classes`), and few masks, since
many states allow the same.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.automaton.dfa import LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.byte_trie import ByteTrie
from rootlace.runtime.constrained.tokens.classes import TokenClasses, token_classes
from rootlace.runtime.contracts.plan import SteppedAutomaton
from rootlace.runtime.lane import Lane

log = logging.getLogger(__name__)

_KEYS = itertools.count()
_AT_ONCE = 8
_SHARE = 0.25
"""Of the automaton's bounds, so much may be taken by looking for all its states: requests stay on
it if there are too many."""


def stepped_automaton(
    trie: ByteTrie,
    eos_token_ids: tuple[int, ...],
    dfa: LazyDfa,
    max_states: int = ConstraintConfig.max_device_states,
    max_bytes: int = ConstraintConfig.max_device_bytes,
) -> SteppedAutomaton | None:
    """The whole of `dfa`, with its own numbers of states; None if that is more than allowed."""
    if dfa.empty or not _explore(dfa, max_states):
        return None
    room = max_bytes - 4 * trie.vocab_size
    classes = token_classes(trie, dfa, room) if room > 0 else None
    if classes is None:
        return None
    found = _masks(classes, eos_token_ids, dfa, room - classes.next_state.nbytes)
    if found is None:
        return None
    masks, mask_of = found
    return SteppedAutomaton(next(_KEYS), classes.token_class, classes.next_state, mask_of, masks)


def _explore(dfa: LazyDfa, max_states: int) -> bool:
    """Visit all states. False if there are too many; what was visited stays."""
    known = 0
    try:
        while known < dfa.num_states:
            if dfa.num_states > max_states or dfa.fullness > _SHARE:
                return False
            stop = min(known + _AT_ONCE, dfa.num_states)
            dfa.transitions(np.arange(known, stop))
            known = stop
    except TooLarge:
        return False
    return True


def _masks(
    classes: TokenClasses, eos_token_ids: tuple[int, ...], dfa: LazyDfa, max_bytes: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """(distinct masks int32 [M, words], which is each state's int32 [states])."""
    vocab = len(classes.token_class)
    words = -(-vocab // 32)
    states = len(classes.next_state)
    accepting = np.array([dfa.accepting(state) for state in range(states)], bool)
    allowed = np.column_stack([accepting, classes.next_state >= 0])
    distinct, mask_of = np.unique(np.packbits(allowed, axis=1), axis=0, return_inverse=True)
    if distinct.shape[0] * words * 4 > max_bytes:
        return None
    patterns = np.unpackbits(distinct, axis=1, count=allowed.shape[1]).astype(bool)
    bits = np.zeros(32 * words, bool)
    masks = np.empty((len(patterns), words), np.int32)
    for mask, pattern in zip(masks, patterns, strict=True):
        bits[:vocab] = pattern[1:].take(classes.token_class)
        bits[list(eos_token_ids)] = pattern[0]
        mask[:] = bitmask.packed(bits)
    return masks, mask_of.reshape(-1).astype(np.int32)


@dataclass(eq=False)
class _Build:
    make: Callable[[], None]
    started: float | None = None


class SteppedBuilds:
    """One daemon thread that makes stepped automata, in the order in which they are asked for."""

    def __init__(
        self,
        max_states: int = ConstraintConfig.max_device_states,
        max_bytes: int = ConstraintConfig.max_device_bytes,
    ) -> None:
        self._bounds = (max_states, max_bytes)
        self._lane: Lane[_Build] = Lane("stepped automata", 1, lambda build: build.make())

    def submit(
        self,
        trie: ByteTrie,
        eos_token_ids: tuple[int, ...],
        dfa: LazyDfa,
        done: Callable[[SteppedAutomaton | None], None],
    ) -> None:
        """`done` is called on the thread with what `stepped_automaton` makes within the bounds."""

        def make() -> None:
            try:
                made = stepped_automaton(trie, eos_token_ids, dfa, *self._bounds)
            except Exception:
                log.exception("an automaton was not made for the device; the host goes on masking")
            else:
                done(made)

        self._lane.put(_Build(make))
