"""Between sequences and the cache: matching, blocks for new tokens, storing, letting go."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import msgspec
import numpy as np

from rootlace.runtime.cache import (
    BlockPool,
    Cause,
    Evicted,
    RadixTree,
    check_cache,
    policy_named,
)
from rootlace.runtime.config import CacheConfig
from rootlace.runtime.scheduler.explain import explain
from rootlace.runtime.scheduler.plan_builder import PlanBuilder
from rootlace.runtime.scheduler.retention import Retention
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.runtime.scheduler.tiers.levels import Tiers
from rootlace.runtime.scheduler.tiers.tiering import Tiering
from rootlace.wire.cache_report import CacheReport, Scope


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

    def make_room(self, blocks: int, sequence: Sequence) -> bool:
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

    def estimate(self, sequence: Sequence) -> int:
        """How many of the sequence's tokens are cached now."""
        if not self.enabled:
            return 0
        return self.tree.descend(sequence.namespace, sequence.tokens, sequence.match_limit())[1]

    def cost(self, sequence: Sequence, tokens: int) -> int:
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

    def attach(self, sequence: Sequence) -> None:
        """Give a sequence without KV its handle."""
        if self.enabled:
            sequence.node = self.tree.enter(sequence.namespace)
        else:
            sequence.detached = True

    def rematch(self, sequence: Sequence) -> int:
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

    def room(self, sequence: Sequence) -> int:
        """How many more tokens the sequence can have, at most, with all available blocks."""
        blocks = sequence.table_len + self._can_adopt(sequence) + self.pool.available
        return blocks * self.block_size - sequence.computed

    def grow(self, sequence: Sequence, count: int, builder: PlanBuilder) -> None:
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

    def store(self, sequence: Sequence, builder: PlanBuilder | None = None) -> None:
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

    def extend(self, sequences: list[Sequence]) -> None:
        """One more block for each; `make_room` was asked before."""
        blocks = self.pool.allocate(len(sequences))
        self.tiering.fetching.restored[blocks] = False
        for sequence, block in zip(sequences, blocks.tolist(), strict=True):
            sequence.add_block(block)

    def rewind(self, sequence: Sequence, computed: int) -> None:
        """Forget the KV behind the first `computed` tokens, none of which is in the tree."""
        if sequence.computed <= computed:
            return
        assert sequence.tree_len <= computed
        self.version += 1
        sequence.computed = computed
        needed = self.blocks_for(computed)
        self.pool.drop(sequence.table[needed : sequence.table_len], pinned=True)
        sequence.table_len = needed

    def release(self, sequence: Sequence) -> None:
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

    def isolate(self, sequence: Sequence) -> None:
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

    def _held(self, sequence: Sequence) -> np.ndarray:
        """The blocks that the sequence itself refers to."""
        return sequence.table[sequence.tree_len // self.block_size : sequence.table_len]

    def _can_adopt(self, sequence: Sequence) -> bool:
        node = sequence.node
        return (
            node is not None
            and sequence.computed % self.block_size != 0
            and sequence.table_len * self.block_size < sequence.computed
            and not node.children
            and int(self.pool.refs[node.blocks[-1]]) == 1
        )

    def check(self, sequences: list[Sequence]) -> None:
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
