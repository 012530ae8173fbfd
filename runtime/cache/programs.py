"""Which programs still run, and so which cached prefixes may be wanted again."""

from __future__ import annotations

from rootlace.runtime.cache.node import Node

CLOSED, NORMAL, LIVE = 0, 1, 2
"""Tiers of nodes, the first to go first. `CLOSED`: only programs that have ended used the node.
`LIVE`: a program that still runs used it. `NORMAL`: everything else."""

_TIDY_AT = 64


class Programs:
    """Programs by name, and the tier of each node.

    A tier falls only when a program is closed. To find the nodes that this concerns without a scan
    of the tree, a live program keeps the nodes where its requests ended.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._live: dict[int, set[Node]] = {}
        self._tidy_at: dict[int, int] = {}
        self._opened = 0

    def tier(self, node: Node) -> int:
        """`CLOSED`, `NORMAL` or `LIVE`."""
        if any(program in self._live for program in node.programs):
            return LIVE
        return CLOSED if node.programs and not node.shared else NORMAL

    def names(self, node: Node) -> tuple[str, ...]:
        """Of the programs that still run and used `node`. O(programs)."""
        if not node.programs:
            return ()
        return tuple(name for name, number in self._open.items() if number in node.programs)

    def open(self, name: str) -> int:
        """The id by which nodes know the program `name`; 0 for the empty name: nobody.

        A program that was closed gets a new id: what it left behind stays left behind.
        """
        if not name:
            return 0
        program = self._open.get(name)
        if program is None:
            self._opened += 1
            program = self._open[name] = self._opened
            self._live[program] = set()
        return program

    def ended_at(self, program: int, node: Node) -> None:
        """A request of `program` ended at `node`."""
        nodes = self._live.get(program)
        if nodes is None or node.is_root:
            return
        nodes.add(node)
        if len(nodes) > self._tidy_at.get(program, _TIDY_AT):
            nodes = {node.nearest_live() for node in nodes}
            self._live[program] = nodes
            self._tidy_at[program] = max(_TIDY_AT, 2 * len(nodes))

    def close(self, name: str) -> set[Node]:
        """The program ended; returns the nodes where its requests did: their tier may be lower."""
        program = self._open.pop(name, 0)
        self._tidy_at.pop(program, None)
        return {node.nearest_live() for node in self._live.pop(program, ())}

    def reset(self) -> None:
        """The tree is gone; programs stay open."""
        self._tidy_at = {}
        self._live = {program: set() for program in self._live}
