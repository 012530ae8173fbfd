"""The vocabulary as a trie over bytes, in flat arrays: what automata are walked against.

Nodes are numbered level by level (the root is 0), each level by parent, then byte. So the children
of a node are a run of nodes, and one level of a walk is a few operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootlace.runtime.constrained.tokens.order import in_order


class ByteTrie:
    """Tokens that stand for no bytes are not in it. Immutable; safe to share between threads.

    With N nodes and tokens of V ids:
    `levels`: the first node of each level, and N at the end;
    `byte` uint8 [N]: the byte that leads to each node (the root: 0);
    `above` int64 [N]: the parent of each node, as an index into its own level (the root: 0);
    `children` int32 [N + 1]: the children of n are the nodes `children[n] : children[n + 1]`;
    `node` int64 [32 * ceil(V / 32)]: where each token ends; N where it stands for no bytes.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.vocab_size = len(token_bytes)
        tokens = in_order(token_bytes)
        end = self._build([token_bytes[i] for i in tokens.tolist()])
        self.node = np.full(-(-self.vocab_size // 32) * 32, self.num_nodes, np.int64)
        self.node[tokens] = end

    @property
    def num_nodes(self) -> int:
        return len(self.byte)

    def _build(self, texts: list[bytes]) -> np.ndarray:
        """From sorted texts; level by level they fall apart where their next bytes differ.

        Returns the node where each text ends.
        """
        lengths = np.array([len(text) for text in texts], np.int32)
        data = np.frombuffer(b"".join(texts), np.uint8)
        at = np.cumsum(lengths, dtype=np.int64) - lengths
        node = np.zeros(len(texts), np.int64)  # where each text stands
        alive = np.arange(len(texts))
        bytes_, above = [np.zeros(1, np.uint8)], [np.zeros(1, np.int64)]
        self.levels = [0, 1]
        depth = 0
        while len(alive):
            byte, parent = data[at[alive] + depth], node[alive]
            fresh = np.ones(len(alive), bool)
            fresh[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            where = np.flatnonzero(fresh)
            node[alive] = np.cumsum(fresh) + (self.levels[-1] - 1)
            bytes_.append(byte[where])
            above.append(parent[where] - self.levels[-2])
            self.levels.append(self.levels[-1] + len(where))
            depth += 1
            alive = alive[lengths[alive] > depth]
        self.byte, self.above = np.concatenate(bytes_), np.concatenate(above)
        parents = self.above[1:] + np.repeat(self.levels[:-2], np.diff(self.levels[1:]))
        counts = np.bincount(parents.astype(np.int64), minlength=len(self.byte))
        self.children = np.ones(len(self.byte) + 1, np.int32)
        self.children[1:] += np.cumsum(counts, dtype=np.int32)
        return node
