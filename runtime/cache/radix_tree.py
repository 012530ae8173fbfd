r"""The pool of KV blocks, and the radix tree over the token sequences whose KV is in it.

root -- "a b c" -- "d e"       match("a b c d x") = 4: prefixes match to the token, inside edges
               \-- "f"         insert "a b g": split "a b c" into "a b" and "c"
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable

import numpy as np

from rootlace.runtime.cache.journal import Cause, Evicted, Journal
from rootlace.runtime.cache.node import POLICIES, EvictionQueue, Node, Programs

MAX_PROGRAMS = 4
"""Programs remembered per node; a node with more programs counts as shared by all."""
_FEW, _SHORT = 8, 1024
"""Blocks and tokens up to which plain Python is faster than NumPy's calls."""


class PoolExhausted(RuntimeError):
    """Raised when more blocks are allocated than are free; the caller did not make room first."""


class BlockPool:
    """Reference counts over `num_blocks` blocks of `block_size` slots; the KV itself lies
    elsewhere.

    Two counts per block, int32 arrays of shape [num_blocks]:

    - `refs`: tree nodes and sequences that refer to the block. A block with 0 is free.
    - `pins`: references that need the block now (locked nodes, and all sequences). A block with
     `refs > 0` and `pins == 0` is held by unlocked nodes alone: eviction can free the block.

    `evictable` counts such blocks, kept up to date by every operation. All operations take arrays
    of *distinct* block ids and cost O(len(array)) in NumPy.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs at least one block of one slot, not {num_blocks} x {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Forget every reference: all blocks are free."""
        self.refs = np.zeros(self.num_blocks, np.int32)
        self.pins = np.zeros(self.num_blocks, np.int32)
        # A stack: the block freed last is handed out first. Block 0 starts on top.
        self._stack = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self.free = self.num_blocks
        self.evictable = 0

    def allocate(self, count: int) -> np.ndarray:
        """Allocate `count` free blocks (int32), each with one reference and one pin."""
        if count > self.free:
            raise PoolExhausted(f"{count} blocks wanted, {self.free} free")
        self.free -= count
        blocks = self._stack[self.free : self.free + count].copy()
        at = blocks.astype(np.intp)
        self.refs[at] = 1
        self.pins[at] = 1
        return blocks

    def retain(self, blocks: np.ndarray, *, pinned: bool) -> None:
        """Add a reference to each of `blocks`, which are not free."""
        _count(self.refs, blocks, 1)
        if pinned:
            self.evictable -= len(_count(self.pins, blocks, 1))

    def drop(self, blocks: np.ndarray, *, pinned: bool) -> int:
        """Remove a reference (and its pin) from each of `blocks`; return the count freed."""
        if not len(blocks):
            return 0
        if pinned:
            self.evictable += len(_count(self.pins, blocks, -1))
        gone = _count(self.refs, blocks, -1)
        count = len(gone)
        if count:
            self._stack[self.free : self.free + count] = gone
            self.free += count
            self.evictable -= count
        return count

    def pin(self, blocks: np.ndarray) -> None:
        """Pin one more of the references to each of `blocks`."""
        self.evictable -= len(_count(self.pins, blocks, 1))

    def unpin(self, blocks: np.ndarray) -> None:
        self.evictable += len(_count(self.pins, blocks, -1))

    @property
    def available(self) -> int:
        """Blocks that are free or can be freed by eviction."""
        return self.free + self.evictable

    def check(self, refs: np.ndarray, pins: np.ndarray) -> None:
        """Compare with counts recomputed from the owners; AssertionError names the first fault."""
        for name, actual, expected in (("refs", self.refs, refs), ("pins", self.pins, pins)):
            wrong = np.flatnonzero(actual != expected)
            if len(wrong):
                block = int(wrong[0])
                raise AssertionError(
                    f"block {block} has {name} {actual[block]}, expected {expected[block]}"
                )
        free = self._stack[: self.free]
        assert distinct(free), "a block is in the free list twice"
        assert not refs[free].any(), "a block in the free list is referred to"
        assert self.free == int(np.count_nonzero(refs == 0)), "a block is lost"
        evictable = int(np.count_nonzero((refs > 0) & (pins == 0)))
        assert self.evictable == evictable, f"evictable {self.evictable}, should be {evictable}"


def _count(counts: np.ndarray, blocks: np.ndarray, change: int) -> list[int] | np.ndarray:
    """Add `change` (1, -1) to the counts of `blocks`; return the blocks that leave or reach 0."""
    if len(blocks) <= _FEW:
        zero, found = int(change < 0), []
        for block in blocks.tolist():
            before = counts.item(block)
            counts[block] = before + change
            if before == zero:
                found.append(block)
        return found
    at = blocks.astype(np.intp)
    counted = counts[at]
    counts[at] = counted + change
    return blocks[counted == int(change < 0)]


def distinct(blocks: np.ndarray) -> bool:
    """Return whether no block is listed twice. Lists are short: a set beats `np.unique`."""
    return len(set(blocks.tolist())) == len(blocks)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Count of leading tokens on which two equally long int32 arrays agree."""
    if len(a) <= _SHORT and a.tobytes() == b.tobytes():
        return len(a)
    first = (a != b).tobytes().find(1)
    return len(a) if first < 0 else first


def _same_users(one: Node, other: Node) -> bool:
    return one.shared == other.shared and one.programs == other.programs


class RadixTree:
    """Cached prefixes, exact to the token. See "Tree and pool" in docs/cache.md.

    A *handle* is a lock that ends at a node and holds the node and all its ancestors. The owner of
    a handle keeps the `Node`, which stays valid, with the same `end`, whatever other operations do.
    A split leaves the lower half the old node; a merge leaves the child. An edge grows in place
    only for the one handle that locks it.

    Edges are *maximal*. A node with exactly one child exists only if one of these holds: it is a
    root; a handle ends at it (then it has more locks than its child); its users differ from its
    child's. The last case lets eviction separate a program's private suffix from the shared prefix.

    Reading costs O(nodes on the path) Python steps and O(tokens) NumPy work.
    """

    def __init__(
        self, pool: BlockPool, eviction: str = "lru", evicted: Evicted | None = None
    ) -> None:
        """`eviction`: the name of the policy. Raises ValueError if unknown."""
        if eviction not in POLICIES:
            raise ValueError(f"there is no eviction policy {eviction!r}")
        self.pool = pool
        self.block_size = pool.block_size
        self.programs = Programs()
        self._policy = POLICIES[eviction](self.programs)
        self._queue = EvictionQueue(self._policy)
        self.evicted = evicted or Evicted()
        self.journal: Journal | None = None
        """Receives every change, if changes are published."""
        self.losing: Callable[[Node, int], None] | None = None
        """Called before a leaf loses its tokens from a position on, to make room."""
        self.expiring: Callable[[Hashable, np.ndarray, int], None] | None = None
        """Called with tokens that get a time to live, and the position from which on."""
        self.forgetting: Callable[[Hashable, np.ndarray, int], None] | None = None
        """Called once for each call of `expiring`, when the time is over."""
        self.roots: dict[Hashable, Node] = {}
        self.num_nodes = 0
        self.num_tokens = 0
        self.evicted_blocks = 0
        self.tick = 0
        """Counts uses; a node's `last_use` is one of its values."""
        self._uids = itertools.count(1)

    # ------------------------------------------------------------ reading

    def descend(
        self, namespace: Hashable, tokens: np.ndarray, limit: int
    ) -> tuple[list[Node], int]:
        """Nodes that `tokens[:limit]` (int32) runs through, and the count of cached tokens.

        Changes nothing. The last node may be matched in part only.
        """
        path: list[Node] = []
        node = self.roots.get(namespace)
        if node is None:
            return path, 0
        position = 0
        while position < limit:
            child = node.children.get(int(tokens[position]))
            if child is None:
                break
            upto = min(child.end, limit)
            same = common_prefix(child.tokens[: upto - position], tokens[position:upto])
            path.append(child)
            position += same
            if position < child.end:
                break
            node = child
        return path, position

    def match(self, namespace: Hashable, tokens: np.ndarray) -> int:
        """Count of cached leading tokens."""
        return self.descend(namespace, tokens, len(tokens))[1]

    def fill_table(self, node: Node, table: np.ndarray, count: int, position: int = 0) -> None:
        """Write the blocks of a node's path into `table[:count]`, at least from `position` on.

        For each block index the deepest node's block wins.
        """
        chain, size = [], self.block_size
        while not node.is_root and node.end > position:
            chain.append(node)
            assert node.parent is not None
            node = node.parent
        for link in reversed(chain):
            first = link.start // size
            stop = min(first + len(link.blocks), count)
            if first < stop:
                table[first:stop] = link.blocks[: stop - first]

    # ------------------------------------------------------------ handles

    def enter(self, namespace: Hashable) -> Node:
        """Return a handle on the namespace's root."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node.root(next(self._uids), namespace)
        root.locks += 1
        return root

    def advance(self, node: Node, tokens: np.ndarray, limit: int, program: int = 0) -> Node:
        """Move a handle from `node` down along the cached part of `tokens[node.end:limit]`."""
        self.tick += 1
        passed = [node]
        current = node
        while current.end < limit:
            position = current.end
            child = current.children.get(int(tokens[position]))
            if child is None:
                break
            upto = min(child.end, limit)
            same = common_prefix(child.tokens[: upto - position], tokens[position:upto])
            if position + same < child.end:
                child = self._split(child, same)
            child.locks += 1
            if child.locks == 1:
                self.pool.pin(child.blocks)
            self._use(child, program)
            passed.append(child)
            current = child
        if current is not node:
            for link in passed:
                if len(link.children) == 1 and not link.is_root:
                    self._merge_if_possible(link)
        return current

    def insert(
        self, node: Node, tokens: np.ndarray, end: int, table: np.ndarray, program: int = 0
    ) -> Node:
        """Put `tokens[node.end:end]`, with KV in the blocks of `table`, into the tree.

        Moves the handle from `node` to the end. Cached tokens keep their blocks, and the caller's
        blocks for these tokens stay outside. The handle's path (`fill_table`) shows the valid
        blocks.
        """
        node = self.advance(node, tokens, end, program)
        position = node.end
        if position == end:
            return node
        rest = tokens[position:end].copy()
        if self.journal is not None:
            self.journal.added(node, rest)
        blocks = table[position // self.block_size : -(-end // self.block_size)].copy()
        self.num_tokens += len(rest)
        fresh = Node(next(self._uids), node, position, end, rest, blocks)
        self._use(fresh, program)
        if not node.children and node.locks == 1 and not node.is_root and _same_users(node, fresh):
            self._grow(node, rest, blocks)
            return node
        fresh.locks = 1
        self.pool.retain(blocks, pinned=True)
        node.children[int(rest[0])] = fresh
        self.num_nodes += 1
        return fresh

    def leave(self, node: Node, program: int = 0) -> None:
        """Release a handle."""
        self.tick += 1
        link: Node | None = node
        while link is not None:
            link.locks -= 1
            link.last_use = self.tick
            if not (link.locks or link.is_root):
                self.pool.unpin(link.blocks)
            link = link.parent
        if program in self.programs.live and not node.is_root:
            self.programs.ended_at(program, node)
        self._settle(node)

    def close_program(self, name: str, wanted: bool = False) -> None:
        """Close a program: nodes used only by the program may go first from now on.

        With `wanted` these nodes count like nodes used by no program.
        """
        for node in self.programs.close(name):
            link: Node | None = node if wanted else None
            while link is not None and not link.shared:
                link.shared = True
                link = link.parent
            if node.is_evictable:
                self._queue.push(node)

    # ------------------------------------------------------------ forgetting

    def evict(self, count: int) -> int:
        """Free `count` evictable blocks, or all if there are fewer, in the policy's order; return
        the count freed.

        The count is higher where removing a leaf lets its neighbours merge. A leaf is trimmed from
        its end, only as far as needed. A leaf inside a block of a locked ancestor frees nothing and
        is removed all the same. Considering such a leaf again each time would cost more than its
        few tokens are worth.
        """
        # Counted by the pool: a merge after a removal may free a partial block as well.
        before = self.pool.free
        while (freed := self.pool.free - before) < count:
            leaf = self._queue.pop()
            if leaf is None:
                break
            self._policy.evicted(leaf)
            remaining = max(len(leaf.blocks) - (count - freed), 0)
            end = (leaf.start // self.block_size + remaining) * self.block_size
            if self.losing is not None:
                self.losing(leaf, end)
            self._cut(leaf, end)
        self.evicted_blocks += freed
        return freed

    def flush(self) -> int:
        """Forget everything without a handle; return the count of freed blocks."""
        self.evicted.cause = Cause(flush=True)
        losing, self.losing = self.losing, None
        try:
            return self.evict(self.pool.num_blocks + 1)
        finally:
            self.losing = losing

    def forget(self, namespace: Hashable, tokens: np.ndarray, start: int, tick: int) -> bool:
        """Forget `tokens` (int32) from position `start` on, unless held, continued or used after
        `tick`.

        Returns False if some of the tokens stay for that reason.
        """
        self.evicted.cause = Cause(expired=True)
        path, known = self.descend(namespace, tokens, len(tokens))
        while path and known > start:
            node = path.pop()
            if not node.is_evictable or node.last_use > tick:
                return False
            self._cut(node, start)
            known = node.start
        if self.forgetting is not None:
            self.forgetting(namespace, tokens, start)
        return True

    def forget_namespace(self, namespace: Hashable) -> None:
        """Forget the prefixes of a namespace without a handle, and the record of their eviction."""
        root = self.roots.get(namespace)
        nodes = [] if root is None else [root]
        for node in nodes:  # the list grows meanwhile: parents come before their children
            nodes.extend(node.children.values())
        for node in reversed(nodes):
            if node.is_evictable:
                if self.journal is not None:
                    self.journal.removed(node, node.start)
                self._remove(node)

    def reset(self) -> None:
        """Forget everything at once, handles and pool too: the content of the memory is lost."""
        self.pool.reset()
        self._queue.reset()
        self._policy.reset()
        self.programs.reset()
        self.evicted.reset()
        if self.journal is not None:
            self.journal.reset()
        self.roots = {}
        self.num_nodes = 0
        self.num_tokens = 0

    # ------------------------------------------------------------ structure

    def _use(self, node: Node, program: int) -> None:
        """Note that a request matched or added `node`, which is locked now; program 0 means no
        particular program."""
        node.last_use = self.tick
        node.uses += 1
        node.worth = self._policy.age + node.uses
        if not program:
            node.shared = True
        elif program not in node.programs:
            node.shared = node.shared or bool(node.programs)
            node.programs = (program, *node.programs[: MAX_PROGRAMS - 1])

    def _split(self, node: Node, count: int) -> Node:
        """Split `node` behind its first `count` tokens; return the new upper half."""
        parent = node.parent
        assert parent is not None
        cut = node.start + count
        first = node.start // self.block_size
        inside = cut // self.block_size - first
        upper_blocks = node.blocks[: -(-cut // self.block_size) - first]
        upper = Node(next(self._uids), parent, node.start, cut, node.tokens[:count], upper_blocks)
        upper.locks = node.locks
        upper.last_use, upper.uses, upper.worth = node.last_use, node.uses, node.worth
        upper.programs, upper.shared = node.programs, node.shared
        parent.children[int(upper.tokens[0])] = upper
        node.parent = upper
        node.start = cut
        node.tokens = node.tokens[count:]
        node.blocks = node.blocks[inside:]
        upper.children[int(node.tokens[0])] = node
        if cut % self.block_size:  # both halves hold the block of the cut
            self.pool.retain(node.blocks[:1], pinned=node.locks > 0)
        self.num_nodes += 1
        return upper

    def _merge_if_possible(self, node: Node) -> None:
        """Merge a node, no root, into its only child, unless the node has a reason to exist."""
        if not node.alive:
            return
        (child,) = node.children.values()
        if child.locks != node.locks or not _same_users(child, node):
            return
        parent = node.parent
        assert parent is not None
        blocks = node.blocks
        if node.end % self.block_size:  # the child's block of this index holds the same rows too
            self.pool.drop(blocks[-1:], pinned=node.locks > 0)
            blocks = blocks[:-1]
        child.tokens = np.concatenate((node.tokens, child.tokens))
        child.blocks = np.concatenate((blocks, child.blocks))
        child.start = node.start
        # The child has the history of both where that favours it.
        child.last_use = max(child.last_use, node.last_use)
        child.uses, child.worth = max(child.uses, node.uses), max(child.worth, node.worth)
        child.parent = parent
        parent.children[int(child.tokens[0])] = child
        node.alive = False
        node.parent = child
        node.children = {}
        self.num_nodes -= 1
        if not child.children and not child.locks:
            self._queue.push(child)

    def _grow(self, leaf: Node, tokens: np.ndarray, blocks: np.ndarray) -> None:
        """Append to a leaf that only the caller's handle locks."""
        old_blocks = leaf.blocks
        if leaf.end % self.block_size:
            # The first new block holds the leaf's rows too: it is the leaf's own block, adopted, or
            # a copy.
            self.pool.retain(blocks, pinned=True)
            self.pool.drop(old_blocks[-1:], pinned=True)
            old_blocks = old_blocks[:-1]
        else:
            self.pool.retain(blocks, pinned=True)
        leaf.blocks = np.concatenate((old_blocks, blocks))
        leaf.tokens = np.concatenate((leaf.tokens, tokens))
        leaf.end += len(tokens)
        leaf.digest = None

    def _cut(self, leaf: Node, end: int) -> None:
        """Forget an unlocked leaf's tokens from position `end` on, all if the leaf begins there."""
        self.evicted.note(leaf, max(end, leaf.start))
        if self.journal is not None:
            self.journal.removed(leaf, end)
        if end <= leaf.start:
            self._remove(leaf)
            return
        remaining = -(-end // self.block_size) - leaf.start // self.block_size
        self.pool.drop(leaf.blocks[remaining:], pinned=False)
        self.num_tokens -= leaf.end - end
        leaf.tokens = leaf.tokens[: end - leaf.start]
        leaf.blocks = leaf.blocks[:remaining]
        leaf.end = end
        leaf.digest = None
        self._queue.push(leaf)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self.pool.drop(leaf.blocks, pinned=False)
        del parent.children[int(leaf.tokens[0])]
        leaf.alive = False
        self.num_nodes -= 1
        self.num_tokens -= len(leaf.tokens)
        self._settle(parent)

    def check_queue(self, leaves: set[Node]) -> None:
        """Raise AssertionError unless `leaves` are the evictable nodes, all queued in time."""
        self._queue.check(leaves)

    def _settle(self, node: Node) -> None:
        """Queue, merge or drop `node`, which lost a handle or a child."""
        if not node.alive:
            return
        if node.children:
            if len(node.children) == 1 and not node.is_root:
                self._merge_if_possible(node)
        elif not node.locks:
            if node.namespace is not None:
                del self.roots[node.namespace]
                node.alive = False
            else:
                self._queue.push(node)


# Check --------------------------------------------------------------------------------------------


def check_cache(tree: RadixTree, handles: list[Node], held: list[np.ndarray]) -> None:
    """Recompute every invariant of tree and pool; raise AssertionError at the first broken one.

    `handles`: every existing handle. `held`: the blocks that sequences hold by themselves, one
    array per sequence. O(nodes + tokens).
    """
    pool = tree.pool
    refs = np.zeros(pool.num_blocks, np.int32)
    pins = np.zeros(pool.num_blocks, np.int32)
    ends = Counter(id(node) for node in handles)
    leaves: set[Node] = set()
    nodes = tokens = 0
    known: set[int] = set()
    for namespace, root in tree.roots.items():
        assert root.namespace == namespace and root.parent is None and root.alive
        assert root.end == 0 and not len(root.blocks)
        assert root.children or root.locks, f"empty root of namespace {namespace!r} was kept"
        stack = [root]
        while stack:
            node = stack.pop()
            known.add(id(node))
            _check_locks(node, ends[id(node)])
            for first, child in node.children.items():
                assert child.parent is node and child.alive, f"{child} is not {node}'s child"
                assert child.tokens[0] == first, f"{child} is filed under the wrong token"
                assert child.start == node.end, f"{child} does not start at the end of {node}"
                assert child.last_use <= node.last_use or node.is_root or node.locks, (
                    f"{child} was used after {node}"
                )
            stack.extend(node.children.values())
            if node.is_root:
                continue
            nodes += 1
            tokens += len(node.tokens)
            _check_edge(node, tree.block_size)
            tree.evicted.check(node)
            refs[node.blocks] += 1
            if node.locks:
                pins[node.blocks] += 1
            elif not node.children:
                leaves.add(node)
    assert all(id(node) in known for node in handles), "a handle ends at a node that is gone"
    assert nodes == tree.num_nodes, f"{tree.num_nodes} nodes counted, there are {nodes}"
    assert tokens == tree.num_tokens, f"{tree.num_tokens} tokens counted, there are {tokens}"
    for blocks in held:
        np.add.at(refs, blocks, 1)
        np.add.at(pins, blocks, 1)
    pool.check(refs, pins)
    tree.check_queue(leaves)


def _check_locks(node: Node, ending: int) -> None:
    below = sum(child.locks for child in node.children.values())
    assert node.locks == below + ending, (
        f"{node}: {ending} handles end here and {below} go on, locks are {node.locks}"
    )
    if len(node.children) == 1 and not node.is_root:
        (child,) = node.children.values()
        assert ending or not _same_users(node, child), (
            f"the edges of {node} and {child} are not one"
        )


def _check_edge(node: Node, block_size: int) -> None:
    assert len(node.tokens) and node.end == node.start + len(node.tokens), f"{node}: bad size"
    first, last = node.start // block_size, (node.end - 1) // block_size
    assert len(node.blocks) == last - first + 1, f"{node} has {len(node.blocks)} blocks"
    assert distinct(node.blocks), f"{node} holds a block twice"
