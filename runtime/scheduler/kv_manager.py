"""The blocks of each request: match, allocate, store in the tree, release.

 tokens   0 ............... tree_len ......... computed ...... length
 blocks   | of the tree path |  own blocks      |  no KV yet   |
 actions  attach, rematch      grow, extend       make_room
                    store moves own blocks into the tree; release gives up the handle

Sections: retention (pins, times to live), cache report, KV store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import msgspec
import numpy as np

from rootlace.runtime.cache.journal import Cause, Evicted
from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import BlockPool, RadixTree, check_cache, distinct
from rootlace.runtime.cache.retention import MAX_PINS, Expiry, Pins
from rootlace.runtime.cache.suffix_index import SuffixIndex
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


class Retention:
    """Retention of prefixes: pins prompts and forgets expired tokens, as requests specify."""

    def __init__(self, tree: RadixTree, config: CacheConfig, clock: Callable[[], float]) -> None:
        self.pins = Pins(tree, int(config.max_pinned * tree.pool.num_blocks), clock)
        self._expiry = Expiry(tree, clock)
        self._enabled = config.enabled
        self._num_blocks = tree.pool.num_blocks
        self._block_size = tree.block_size
        self._clock = clock
        self.due = math.inf
        """No pin and no time to live ends before this time."""

    def check_pin(self, sequence: RequestState, longest: int) -> None:
        """Raise PinRefused if a prompt cannot be pinned now; an optional pin is skipped instead.

        The error names limits, and nothing of other clients' pins and requests. `longest`: the
        maximum length of any other sequence. That length must fit beside all pins (the last token
        needs no KV). So must `sequence`, without the full blocks of its prompt, which the pin
        holds.
        """
        if sequence.pinned:
            return
        prompt = sequence.tokens[: sequence.prompt_len]
        if pin_id(sequence.namespace, prompt) in self.pins:
            return  # the pin is renewed
        request = sequence.request
        optional = request.handling.cache.pin == "try"
        if not self._enabled and not optional:
            raise InvalidRequest("nothing can be pinned: the cache is switched off")
        own_rest = self._blocks(sequence.full) - sequence.prompt_len // self._block_size
        beside = max(self._blocks(longest), own_rest)
        max_pinned = min(self.pins.limit, self._num_blocks - beside)
        needed = self.pins.needed(sequence.namespace, prompt)
        full = (needed and self.pins.blocks + needed > max_pinned) or len(self.pins) >= MAX_PINS
        limit = request.max_pins
        enough = limit is not None and self.pins.held_by(request.client) >= limit
        if optional and (full or enough or not self._enabled):
            sequence.pinned = True
        elif enough:
            raise PinRefused(f"the API key may have {limit} pins at a time (max_pins)")
        elif full:
            raise PinRefused(
                f"there is no room for {needed} more pinned blocks: at most {self.pins.limit} of "
                f"{self._num_blocks} may be pinned (max_pinned), in {MAX_PINS} prompts, and the "
                "longest request that is here needs room beside them"
            )

    def _blocks(self, length: int) -> int:
        """Return the number of blocks that a sequence of `length` tokens holds."""
        return -(-(length - 1) // self._block_size)

    def pin(self, sequence: RequestState) -> None:
        """Pin the sequence's prompt, which is in the tree and passed `check_pin`."""
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
        self.due = min(self.due, self.pins.next_end)

    def released(self, sequence: RequestState) -> None:
        """Start the time to live, if any, of the tokens that the sequence added to the tree."""
        cache = sequence.request.handling.cache
        if cache.ttl is not None and not cache.pin:  # with a pin, `ttl` is the pin's time
            known = sequence.tokens[: sequence.tree_len]
            self._expiry.keep(sequence.namespace, known, sequence.first_cached, cache.ttl)
            self.due = min(self.due, self._expiry.next_end)

    def expire(self) -> None:
        """Release expired pins and forget expired tokens."""
        if self.due <= self._clock():
            self.pins.expire()
            self._expiry.expire()
            self.due = min(self.pins.next_end, self._expiry.next_end)

    def end(self) -> None:
        """Forget all tokens with a time to live, before a stop."""
        self._expiry.end()

    def reset(self) -> None:
        """Forget all pins and times to live after the tree was lost."""
        self.pins.reset()
        self._expiry.reset()


# Cache report -------------------------------------------------------------------------------------


SHOWN = 16
"""Tokens shown of the tree's different continuation."""
_LOST = 16
_NAMESPACES = 64
"""Most other namespaces searched."""


def explain(
    tree: RadixTree, namespace: Hashable, tokens: np.ndarray, limit: int, scope: Scope
) -> CacheReport:
    """Explain how far `tokens[:limit]` (int32) match the tree, and why no further.

    Fewer than `_LOST` evicted tokens explain nothing if other tokens follow in the tree and the
    prompt continues behind the evicted ones: any two prompts may begin alike.
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
    """First tokens behind `position` in the most recent continuation, and the count of
    continuations."""
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
    """Return the longest prefix of `tokens` that another namespace holds, in tokens."""
    others = [name for name in tree.roots if name != namespace][:_NAMESPACES]
    return max((tree.descend(name, tokens, limit)[1] for name in others), default=0)


# KV store -----------------------------------------------------------------------------------------


class KVStore:
    """Store of KV: all operations that change which request holds which block. With
    `CacheConfig.enabled` false every sequence is detached and nothing enters the tree."""

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float],
        tiers: Tiers | None = None,
        suffixes: SuffixIndex | None = None,
    ) -> None:
        """`suffixes`: the index of texts for drafts."""
        if config.num_blocks is None:
            raise ValueError("CacheConfig.num_blocks must be resolved before the scheduler is made")
        self.enabled = config.enabled
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.tree = RadixTree(self.pool, config.eviction, Evicted(clock))
        self.retention = Retention(self.tree, config, clock)
        below = tiers if tiers is not None and config.enabled else Tiers()
        self.tiering = Tiering(self.tree, below, self.make_room)
        self.suffixes = suffixes
        self.block_size = config.block_size
        self._evict_at_least = min(config.num_blocks // 1024, 64)
        """Least blocks evicted at once, so that few steps evict."""
        self.version = 0
        """Version, changed whenever a table changes other than by one more block at its end."""

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def make_room(self, blocks: int, sequence: RequestState) -> bool:
        """Free `blocks` blocks for `sequence`, evicting if needed.

        Returns False, with nothing evicted, if impossible. For several sequences pass any of them.
        """
        pool = self.pool
        if pool.free >= blocks:
            return True
        if self.tiering.active and pool.available < blocks:
            self.tiering.give_up()  # fetches and transfers may hold blocks
        if pool.available < blocks:
            return False
        if pool.free < blocks:
            self.tree.evicted.cause = Cause(sequence.namespace, sequence.request.program)
            self.tree.evict(max(blocks - self.pool.free, self._evict_at_least))
        return True

    def estimate(self, sequence: RequestState) -> int:
        """Return the number of the sequence's leading tokens that are cached now."""
        if not self.enabled:
            return 0
        return self.tree.descend(sequence.namespace, sequence.tokens, sequence.match_limit())[1]

    def cost(self, sequence: RequestState, tokens: int) -> int:
        """Return the available blocks taken by bringing a waiting sequence to `tokens` tokens.

        Matched evictable blocks stop being evictable once the sequence locks them. The result is an
        upper bound: blocks that two matched nodes share count twice.
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
        """Explain how far `tokens[:limit]` are cached."""
        if not self.enabled:
            return CacheReport(0, limit, "disabled")
        report = explain(self.tree, namespace, tokens, limit, scope)
        below = self.tiering.fetching.reach(namespace, tokens, report.matched, limit)
        return msgspec.structs.replace(report, on_disk=below) if below else report

    def reset(self) -> None:
        """Forget all KV."""
        self.tiering.reset()
        self.tree.reset()
        self.retention.reset()

    # ------------------------------------------------------------ prefill

    def rematch(self, sequence: RequestState) -> int:
        """Extend the sequence by tokens cached behind its computed ones; return their count."""
        node = sequence.node
        limit = sequence.match_limit()
        if node is None or limit <= sequence.tree_len:
            return 0
        node = self.tree.advance(node, sequence.tokens, limit, sequence.program)
        gained = node.end - sequence.tree_len
        if not gained:
            return 0
        if sequence.table_len * self.block_size > sequence.tree_len:
            # The partial block about to be continued.
            self.pool.drop(self._held(sequence), pinned=True)
        self.version += 1
        whole = node.end // self.block_size
        if whole > len(sequence.table):
            sequence.reserve_table(whole)
        self.tree.fill_table(node, sequence.table, whole, sequence.tree_len)
        sequence.table_len = whole
        sequence.node = node
        sequence.tree_len = sequence.computed = node.end
        return gained

    def max_growth(self, sequence: RequestState) -> int:
        """Return how many more tokens the sequence can have with all available blocks."""
        pool = self.pool
        blocks = sequence.table_len + pool.free + pool.evictable
        if sequence.table_len * self.block_size < sequence.computed:
            blocks += self._can_adopt(sequence)
        return blocks * self.block_size - sequence.computed

    def grow(self, sequence: RequestState, count: int, builder: PlanBuilder) -> None:
        """Allocate blocks for `count` more tokens, within `max_growth`.

        A sequence that continues inside a tree block adopts the block if no other request holds it.
        Otherwise the sequence gets a copy of the block's rows so far.
        """
        node = sequence.node
        inside = sequence.computed % self.block_size
        partial = sequence.table_len * self.block_size < sequence.computed
        if partial and self._can_adopt(sequence):
            assert node is not None
            tail = node.blocks[-1:].copy()
            self.pool.retain(tail, pinned=True)
            sequence.add_block(int(tail[0]))
            partial = False
        needed = -(-(sequence.computed + count) // self.block_size) - sequence.table_len
        if needed <= 0:
            return
        self.version += 1
        if self.pool.free < needed:
            self.make_room(needed, sequence)
        blocks = self.pool.allocate(needed)
        self.tiering.fetching.restored[blocks] = False
        end = sequence.table_len + needed
        if end > len(sequence.table):
            sequence.reserve_table(end)
        sequence.table[sequence.table_len : end] = blocks
        sequence.table_len = end
        if partial:
            assert node is not None
            builder.share_rows(int(node.blocks[-1]), int(blocks[0]), inside)

    def store(self, sequence: RequestState, builder: PlanBuilder | None = None) -> None:
        """Put the computed tokens into the tree and move the handle; an unknown token stays
        outside.

        For tokens that were in the tree already, the tree's blocks replace the sequence's own. With
        a `builder`, own blocks are freed when the plan is complete, because this step writes to
        them.
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
        self.tree.fill_table(node, sequence.table, new, sequence.tree_len)
        if builder is not None:
            # The tree may hold the same block, and may replace it before the plan is built.
            replaced = held != sequence.table[old:new]
            if replaced.any():
                builder.drop_later(held[replaced])
                held = held[~replaced]
        if len(held):
            self.pool.drop(held, pinned=True)
        sequence.node = node
        sequence.tree_len = end

    # ------------------------------------------------------------ decode, ending

    def extend(self, sequences: list[RequestState]) -> None:
        """Add one block to each sequence, after `make_room`."""
        blocks = self.pool.allocate(len(sequences))
        self.tiering.fetching.restored[blocks] = False
        for sequence, block in zip(sequences, blocks.tolist(), strict=True):
            sequence.add_block(block)

    def rewind(self, sequence: RequestState, computed: int) -> None:
        """Forget the KV behind the first `computed` tokens, none of which is in the tree."""
        assert sequence.tree_len <= computed
        self.version += 1
        sequence.computed = computed
        needed = self.blocks_for(computed)
        self.pool.drop(sequence.table[needed : sequence.table_len], pinned=True)
        sequence.table_len = needed

    def release(self, sequence: RequestState) -> None:
        """Release a sequence that ends or is preempted; its computed tokens stay in the tree,
        unlocked."""
        self.version += 1
        if sequence.detached and self.enabled:
            sequence.node = self.tree.enter(sequence.namespace)
        self.store(sequence)
        held = sequence.table[sequence.tree_len // self.block_size : sequence.table_len]
        self.pool.drop(held, pinned=True)
        if sequence.node is not None:
            self.tree.leave(sequence.node, sequence.program)
            if sequence.request.handling.cache.ttl is not None:
                self.retention.released(sequence)
        sequence.forget_kv()

    def isolate(self, sequence: RequestState) -> None:
        """Make everything but the sequence's own blocks evictable.

        Partial blocks of the path are unused but stay locked with the path. When the pool is too
        small for them, a decoding sequence detaches with its table, and a sequence in prefill
        restarts from zero. The sequence then gets as far as with an empty cache.
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
        """Return the blocks that the sequence itself refers to."""
        return sequence.table[sequence.tree_len // self.block_size : sequence.table_len]

    def _can_adopt(self, sequence: RequestState) -> bool:
        """Return whether no other request holds the tree block that the sequence continues in."""
        node = sequence.node
        return node is not None and not node.children and int(self.pool.refs[node.blocks[-1]]) == 1

    def check(self, sequences: list[RequestState]) -> None:
        """Raise AssertionError unless tree, pool and `sequences` (all with KV) agree."""
        handles = [sequence.node for sequence in sequences if sequence.node is not None]
        pins = self.retention.pins
        handles += pins.nodes() + self.tiering.fetching.nodes() + self.tiering.handing.nodes()
        self.tiering.check()
        assert pins.blocks <= pins.limit, "too much is pinned"
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
            assert distinct(held), f"{sequence} holds a block twice"
            if sequence.tree_len < sequence.computed or len(held):
                assert sequence.table_len == self.blocks_for(sequence.computed), sequence
            if node is None:
                continue
            whole = sequence.tree_len // self.block_size
            assert sequence.table_len >= whole, sequence
            table = np.full(whole, -1, np.int32)
            self.tree.fill_table(node, table, whole)
            assert np.array_equal(table, sequence.table[:whole]), (
                f"{sequence}: not its path's table"
            )
            while not node.is_root:
                path_tokens = sequence.tokens[node.start : node.end]
                assert np.array_equal(node.tokens, path_tokens), f"{sequence} is on another's path"
                assert node.parent is not None
                node = node.parent
