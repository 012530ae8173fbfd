"""Between sequences and the cache: matching, blocks for new tokens, storing, letting go."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import msgspec
import numpy as np

from rootlace.runtime.cache import (
    MAX_PINS,
    BlockPool,
    Cause,
    Evicted,
    Expiry,
    Node,
    Pins,
    RadixTree,
    check_cache,
    policy_named,
)
from rootlace.runtime.config import CacheConfig
from rootlace.runtime.contracts.messages import pin_id
from rootlace.runtime.scheduler.batch import PlanBuilder
from rootlace.runtime.scheduler.offload.levels import Tiers
from rootlace.runtime.scheduler.offload.tiering import Tiering
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.errors import InvalidRequest, PinRefused
from rootlace.wire.protocol import CacheReport, Reason, Scope
from rootlace.wire.sampling import PIN_SECONDS

# Retention ----------------------------------------------------------------------------------------
#
# How long what requests leave in the cache stays there: their pins, and their times to live.


class Retention:
    """Pins prompts, and forgets tokens that have had their time, as requests ask for it."""

    def __init__(self, tree: RadixTree, config: CacheConfig, clock: Callable[[], float]) -> None:
        self.pins = Pins(tree, int(config.max_pinned * tree.pool.num_blocks), clock)
        self._expiry = Expiry(tree, clock)
        self._enabled = config.enabled
        self._num_blocks = tree.pool.num_blocks
        self._block_size = tree.block_size

    def check_pin(self, sequence: RequestState, longest: int) -> None:
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

    def pin(self, sequence: RequestState) -> None:
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

    def released(self, sequence: RequestState) -> None:
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


# Explain ------------------------------------------------------------------------------------------
#
# Why a prompt matches as far as it does, and no further.


SHOWN = 16
"""So many tokens of what the tree holds instead are shown."""
_LOST = 16
_NAMESPACES = 64
"""At most so many other namespaces are looked into."""


def explain(
    tree: RadixTree, namespace: Hashable, tokens: np.ndarray, limit: int, scope: Scope
) -> CacheReport:
    """What the tree says of `tokens[:limit]` (int32) now. Changes nothing.

    Fewer than `_LOST` evicted tokens that are not the rest of the prompt explain nothing where
    something else follows in the tree: any two prompts may begin alike.
    """
    path, matched = tree.descend(namespace, tokens, limit)
    if matched >= limit:
        return CacheReport(limit, limit, "whole")
    instead, continuations = _instead(path[-1] if path else tree.roots.get(namespace), matched)
    reach, eviction = tree.evicted.beyond(namespace, tokens[:limit], matched)
    elsewhere = _elsewhere(tree, namespace, tokens, limit) if scope == "all" else 0
    reason: Reason = "new"
    lost_to, lost_seconds = "", 0.0
    lost = reach - matched
    if eviction is not None and (lost >= _LOST or reach == limit or not instead):
        cause = eviction.cause
        reason = "flushed" if cause.flush else "expired" if cause.expired else "evicted"
        lost_to = cause.program if cause.namespace == namespace else ""
        lost_seconds = tree.evicted.seconds_since(eviction)
    elif instead:
        reason = "differs"
    elif elsewhere > matched:
        reason = "namespace"
    return CacheReport(
        matched,
        limit,
        reason,
        instead=instead,
        continuations=continuations,
        lost=lost,
        lost_seconds=lost_seconds,
        lost_to=lost_to,
        elsewhere=elsewhere if elsewhere > matched else 0,
    )


def _instead(node: Node | None, position: int) -> tuple[tuple[int, ...], int]:
    """The first tokens behind `position` in the continuation used last, and how many
    continuations there are."""
    if node is None:
        return (), 0
    if position < node.end:
        rest, count = node.tokens[position - node.start :], 1
    elif node.children:
        latest = max(node.children.values(), key=lambda child: child.last_use)
        rest, count = latest.tokens, len(node.children)
    else:
        return (), 0
    return tuple(rest[:SHOWN].tolist()), count


def _elsewhere(tree: RadixTree, namespace: Hashable, tokens: np.ndarray, limit: int) -> int:
    """The most tokens that another namespace holds."""
    others = [name for name in tree.roots if name != namespace][:_NAMESPACES]
    return max((tree.descend(name, tokens, limit)[1] for name in others), default=0)


# Kv -----------------------------------------------------------------------------------------------


class KVStore:
    """All operations that change who holds which block.

    With `CacheConfig.enabled` false every sequence is detached and nothing enters the tree.
    """

    def __init__(
        self, config: CacheConfig, clock: Callable[[], float], tiers: Tiers | None = None
    ) -> None:
        if config.num_blocks is None:
            raise ValueError("CacheConfig.num_blocks must be resolved before the scheduler is made")
        self.enabled = config.enabled
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.tree = RadixTree(self.pool, policy_named(config.eviction), Evicted(clock))
        self.retention = Retention(self.tree, config, clock)
        below = tiers if tiers is not None and config.enabled else Tiers()
        self.tiering = Tiering(self.tree, below, self.make_room)
        self.block_size = config.block_size
        self._evict_at_least = min(config.num_blocks // 1024, 64)
        """Evict in batches of this size, so that not every step has to."""
        self.version = 0
        """Changes whenever a sequence's table changes other than by one more block at its end."""

    @property
    def capacity(self) -> int:
        """Tokens the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def make_room(self, blocks: int, sequence: RequestState) -> bool:
        """Have `blocks` blocks free for `sequence` (or for several, it being one of them), evicting
        if needed; False (and nothing lost) if impossible."""
        if self.pool.available < blocks:
            self.tiering.give_up()  # which may hold some
        if self.pool.available < blocks:
            return False
        if self.pool.free < blocks:
            self.tree.evicted.cause = Cause(sequence.namespace, sequence.request.program)
            self.tree.evict(max(blocks - self.pool.free, self._evict_at_least))
        return True

    def estimate(self, sequence: RequestState) -> int:
        """How many of the sequence's tokens are cached now."""
        if not self.enabled:
            return 0
        return self.tree.descend(sequence.namespace, sequence.tokens, sequence.match_limit())[1]

    def cost(self, sequence: RequestState, tokens: int) -> int:
        """How many available blocks it takes to bring a waiting sequence to `tokens` tokens.

        Matched blocks that are evictable now will not be once the sequence locks them. An upper
        bound: blocks that two matched nodes share count twice.
        """
        needed = self.blocks_for(tokens)
        if not self.enabled:
            return needed
        path, matched = self.tree.descend(
            sequence.namespace, sequence.tokens, sequence.match_limit()
        )
        pinned = sum(
            int(np.count_nonzero(self.pool.pins[node.blocks] == 0))
            for node in path
            if not node.locks
        )
        return needed - matched // self.block_size + pinned

    def explain(
        self, namespace: Hashable, tokens: np.ndarray, limit: int, scope: Scope
    ) -> CacheReport:
        """Why `tokens[:limit]` are cached as far as they are."""
        if not self.enabled:
            return CacheReport(0, limit, "disabled")
        report = explain(self.tree, namespace, tokens, limit, scope)
        below = self.tiering.fetching.reach(namespace, tokens, report.matched, limit)
        return msgspec.structs.replace(report, on_disk=below) if below else report

    def reset(self) -> None:
        """All KV is lost."""
        self.tiering.reset()
        self.tree.reset()
        self.retention.reset()

    # ------------------------------------------------------------ prefill

    def attach(self, sequence: RequestState) -> None:
        """Give a sequence without KV its handle."""
        if self.enabled:
            sequence.node = self.tree.enter(sequence.namespace)
        else:
            sequence.detached = True

    def rematch(self, sequence: RequestState) -> int:
        """Take what is cached behind the sequence's computed tokens; returns how many tokens."""
        node = sequence.node
        limit = sequence.match_limit()
        if node is None or limit <= sequence.tree_len:
            return 0
        node = self.tree.advance(node, sequence.tokens, limit, sequence.program)
        gained = node.end - sequence.tree_len
        if not gained:
            return 0
        self.pool.drop(self._held(sequence), pinned=True)  # the block it was about to continue
        self.version += 1
        whole = node.end // self.block_size
        sequence.reserve_table(whole)
        node.fill_table(sequence.table, whole, self.block_size, sequence.tree_len)
        sequence.table_len = whole
        sequence.node = node
        sequence.tree_len = sequence.computed = node.end
        return gained

    def room(self, sequence: RequestState) -> int:
        """How many more tokens the sequence can have, at most, with all available blocks."""
        blocks = sequence.table_len + self._can_adopt(sequence) + self.pool.available
        return blocks * self.block_size - sequence.computed

    def grow(self, sequence: RequestState, count: int, builder: PlanBuilder) -> None:
        """Get blocks for `count` more tokens, which `room` said there are.

        A sequence that continues inside a block of the tree adopts it if nobody else holds it, and
        otherwise gets a copy of its rows so far.
        """
        node = sequence.node
        inside = sequence.computed % self.block_size
        partial = inside and sequence.table_len * self.block_size < sequence.computed
        if partial and self._can_adopt(sequence):
            assert node is not None
            tail = node.blocks[-1:].copy()
            self.pool.retain(tail, pinned=True)
            sequence.extend_table(tail)
            partial = False
        needed = self.blocks_for(sequence.computed + count) - sequence.table_len
        if needed <= 0:
            return
        self.version += 1
        self.make_room(needed, sequence)
        blocks = self.pool.allocate(needed)
        self.tiering.fetching.restored[blocks] = False
        sequence.extend_table(blocks)
        if partial:
            assert node is not None
            builder.share_rows(int(node.blocks[-1]), int(blocks[0]), inside)

    def store(self, sequence: RequestState, builder: PlanBuilder | None = None) -> None:
        """Put the computed tokens into the tree and move the handle there; a token that is not
        known yet stays outside.

        For tokens that were in the tree already, the sequence gives up its own blocks and takes the
        tree's. With a `builder` its own are freed only when the plan is complete, because this step
        writes to them.
        """
        node, size = sequence.node, self.block_size
        end = min(sequence.computed, sequence.length)
        if node is None or end == sequence.tree_len:
            return
        self.version += 1
        old, new = sequence.tree_len // size, end // size
        held = sequence.table[old:new].copy()
        table = sequence.table[: sequence.table_len]
        node = self.tree.insert(node, sequence.tokens, end, table, sequence.program)
        node.fill_table(sequence.table, new, size, sequence.tree_len)
        if builder is not None:
            # The tree may hold one, too, and give it up for a better one before the plan is made.
            replaced = held != sequence.table[old:new]
            if replaced.any():
                builder.drop_later(held[replaced])
                held = held[~replaced]
        self.pool.drop(held, pinned=True)
        sequence.node = node
        sequence.tree_len = end

    # ------------------------------------------------------------ decode, ending

    def extend(self, sequences: list[RequestState]) -> None:
        """One more block for each; `make_room` was asked before."""
        blocks = self.pool.allocate(len(sequences))
        self.tiering.fetching.restored[blocks] = False
        for sequence, block in zip(sequences, blocks.tolist(), strict=True):
            sequence.add_block(block)

    def rewind(self, sequence: RequestState, computed: int) -> None:
        """Forget the KV behind the first `computed` tokens, none of which is in the tree."""
        if sequence.computed <= computed:
            return
        assert sequence.tree_len <= computed
        self.version += 1
        sequence.computed = computed
        needed = self.blocks_for(computed)
        self.pool.drop(sequence.table[needed : sequence.table_len], pinned=True)
        sequence.table_len = needed

    def release(self, sequence: RequestState) -> None:
        """The sequence ends or is retracted: what it computed stays in the tree, unlocked."""
        self.version += 1
        if sequence.detached and self.enabled:
            sequence.node = self.tree.enter(sequence.namespace)
        self.store(sequence)
        self.pool.drop(self._held(sequence), pinned=True)
        if sequence.node is not None:
            self.tree.leave(sequence.node, sequence.program)
            self.retention.released(sequence)
        sequence.forget_kv()

    def isolate(self, sequence: RequestState) -> None:
        """Make everything but the sequence's own blocks evictable.

        Partial blocks of the path are needed by nobody but stay locked with it. When the pool is
        too small for them, a decoding sequence takes its table for itself; one in prefill starts
        again from nothing. It then gets as far as it would have with an empty cache.
        """
        node = sequence.node
        if node is None:
            return
        self.version += 1
        if sequence.decoding:
            shared = sequence.table[: sequence.tree_len // self.block_size]
            self.pool.retain(shared, pinned=True)
            self.tree.leave(node, sequence.program)
            sequence.node = None
            sequence.tree_len = 0
        else:
            self.pool.drop(self._held(sequence), pinned=True)
            self.tree.leave(node, sequence.program)
            sequence.forget_kv()
        sequence.detached = True

    # ------------------------------------------------------------ inside

    def _held(self, sequence: RequestState) -> np.ndarray:
        """The blocks that the sequence itself refers to."""
        return sequence.table[sequence.tree_len // self.block_size : sequence.table_len]

    def _can_adopt(self, sequence: RequestState) -> bool:
        node = sequence.node
        return (
            node is not None
            and sequence.computed % self.block_size != 0
            and sequence.table_len * self.block_size < sequence.computed
            and not node.children
            and int(self.pool.refs[node.blocks[-1]]) == 1
        )

    def check(self, sequences: list[RequestState]) -> None:
        """Raise AssertionError unless tree, pool and `sequences` (all with KV) fit together."""
        handles = [sequence.node for sequence in sequences if sequence.node is not None]
        pins = self.retention.pins
        handles += pins.nodes() + self.tiering.fetching.nodes() + self.tiering.handing.nodes()
        self.tiering.check()
        assert pins.blocks <= pins.most, "too much is pinned"
        check_cache(self.tree, handles, [self._held(sequence) for sequence in sequences])
        for sequence in sequences:
            node = sequence.node
            assert sequence.tree_len <= min(sequence.computed, sequence.length), sequence
            if sequence.decoding and sequence.ending is None:
                assert sequence.computed + 1 == sequence.length + sequence.pending, sequence
            else:
                assert sequence.computed <= sequence.length, sequence
            assert (node is None) == sequence.detached, sequence
            end = 0 if node is None else node.end
            assert sequence.tree_len == end, f"{sequence}: handle at {end}"
            held = self._held(sequence)
            assert len(np.unique(held)) == len(held), f"{sequence} holds a block twice"
            if sequence.tree_len < sequence.computed or len(held):
                assert sequence.table_len == self.blocks_for(sequence.computed), sequence
            if node is None:
                continue
            whole = sequence.tree_len // self.block_size
            assert sequence.table_len >= whole, sequence
            table = np.full(whole, -1, np.int32)
            node.fill_table(table, whole, self.block_size)
            assert np.array_equal(table, sequence.table[:whole]), (
                f"{sequence}: not its path's table"
            )
            while not node.is_root:
                mine = sequence.tokens[node.start : node.end]
                assert np.array_equal(node.tokens, mine), f"{sequence} is on another's path"
                assert node.parent is not None
                node = node.parent
