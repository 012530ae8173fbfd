"""How long what requests leave in the cache stays there: their pins, and their times to live."""

from __future__ import annotations

from collections.abc import Callable

from rootlace.runtime.cache import MAX_PINS, Expiry, Pins, RadixTree
from rootlace.runtime.config import CacheConfig
from rootlace.runtime.contracts.request import pin_id
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.wire.errors import InvalidRequest, PinRefused
from rootlace.wire.handling import PIN_SECONDS


class Retention:
    """Pins prompts, and forgets tokens that have had their time, as requests ask for it."""

    def __init__(self, tree: RadixTree, config: CacheConfig, clock: Callable[[], float]) -> None:
        self.pins = Pins(tree, int(config.max_pinned * tree.pool.num_blocks), clock)
        self._expiry = Expiry(tree, clock)
        self._enabled = config.enabled
        self._num_blocks = tree.pool.num_blocks
        self._block_size = tree.block_size

    def check_pin(self, sequence: Sequence, longest: int) -> None:
        """Raises PinRefused if a prompt that is to be pinned cannot be, as things are now; if it is
        only to be tried, it is not pinned then.

        `longest`: the most tokens that any other sequence may come to. It must fit beside all pins
        (the last token needs no KV). So must `sequence`, but for the full blocks of its prompt,
        which the pin holds.
        """
        if sequence.pinned:
            return
        prompt = sequence.tokens[: sequence.prompt_len]
        if pin_id(sequence.namespace, prompt) in self.pins:
            return  # it is only renewed
        request = sequence.request
        optional = request.handling.cache.pin == "try"
        if not self._enabled and not optional:
            raise InvalidRequest("nothing can be pinned: the cache is switched off")
        own_rest = self._blocks(sequence.full) - sequence.prompt_len // self._block_size
        beside = max(self._blocks(longest), own_rest)
        most = min(self.pins.most, self._num_blocks - beside)
        needed = self.pins.needed(sequence.namespace, prompt)
        full = (needed and self.pins.blocks + needed > most) or len(self.pins) >= MAX_PINS
        own = request.max_pins
        enough = own is not None and self.pins.held_by(request.client) >= own
        if optional and (full or enough or not self._enabled):
            sequence.pinned = True
        elif enough:
            raise PinRefused(f"the API key may have {own} pins at a time (max_pins)")
        elif full:
            raise PinRefused(
                f"{self.pins.blocks} blocks are pinned, and {needed} more would be; at most "
                f"{max(most, 0)} of {self._num_blocks} may be now (max_pinned, and room for "
                "the longest request that is here)"
            )

    def _blocks(self, length: int) -> int:
        """What a sequence of so many tokens holds."""
        return -(-(length - 1) // self._block_size)

    def pin(self, sequence: Sequence) -> None:
        """Hold the sequence's prompt, which is in the tree; `check_pin` was asked before."""
        prompt = sequence.tokens[: sequence.prompt_len]
        seconds = sequence.request.handling.cache.ttl or PIN_SECONDS
        sequence.pin = pin_id(sequence.namespace, prompt)
        self.pins.hold(
            sequence.pin,
            sequence.namespace,
            prompt,
            seconds,
            sequence.program,
            sequence.request.client,
        )

    def released(self, sequence: Sequence) -> None:
        """Give what the sequence added to the tree its time to live, if it has one."""
        cache = sequence.request.handling.cache
        if cache.ttl is not None and not cache.pin:
            known = sequence.tokens[: sequence.tree_len]
            self._expiry.keep(sequence.namespace, known, sequence.found, cache.ttl)

    def expire(self) -> None:
        """Let go of pins, and forget tokens, that have had their time."""
        self.pins.expire()
        self._expiry.expire()

    def end(self) -> None:
        """Forget what has a time to live now, though its time is not over."""
        self._expiry.end()

    def reset(self) -> None:
        """The tree is gone."""
        self.pins.reset()
        self._expiry.reset()
