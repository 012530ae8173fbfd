"""A program as a graph: what `Function.trace` gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from rootlace.language.failures import Site

Kind = Literal["text", "ids", "role", "value", "gen", "select", "fork", "join", "call"]


@dataclass(eq=False)
class Node:
    """One thing a program does. `uses` are the nodes whose values it needs, besides the one before.

    `detail` describes it; `branches` are the forks of a fork and the program of a call.
    """

    id: int
    kind: Kind
    detail: str
    site: Site
    name: str | None = None
    uses: tuple[Node, ...] = ()
    branches: tuple[BranchGraph, ...] = ()


@dataclass(eq=False)
class BranchGraph:
    """What happens on one branch, in order, and the variables that it names."""

    nodes: list[Node] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Trace:
    """What `Function.trace` gives; `str()` draws it as a tree.

    `prefix` is the text every run of the program starts with. `stopped` says where and why the
    trace had to end early, or is "".
    """

    name: str
    root: BranchGraph
    prefix: str = ""
    stopped: str = ""

    @property
    def nodes(self) -> list[Node]:
        """All nodes, forks' included, in the order in which the program made them."""
        return sorted(_walk(self.root), key=lambda node: node.id)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """(id of a node, id of a node that needs it)."""
        return sorted(_edges(self.root, None))

    @property
    def variables(self) -> list[str]:
        """The names the program gives to values, in order."""
        return list(self.root.variables)

    def __str__(self) -> str:
        lines = [self.name, *_draw(self.root)]
        if self.stopped:
            lines.append(f"(the rest is unknown: {self.stopped})")
        return "\n".join(lines)


def _walk(branch: BranchGraph) -> Iterator[Node]:
    for node in branch.nodes:
        yield node
        for inner in node.branches:
            yield from _walk(inner)


def _edges(branch: BranchGraph, before: Node | None) -> Iterator[tuple[int, int]]:
    for node in branch.nodes:
        if before is not None:
            yield before.id, node.id
        for used in node.uses:
            if used is not before:
                yield used.id, node.id
        for inner in node.branches:
            yield from _edges(inner, node)
        before = node


def _draw(branch: BranchGraph, indent: str = "") -> Iterator[str]:
    for index, node in enumerate(branch.nodes):
        last = index == len(branch.nodes) - 1
        yield f"{indent}{'└─' if last else '├─'} {_describe(node)}"
        deeper = indent + ("   " if last else "│  ")
        for number, inner in enumerate(node.branches):
            end = number == len(node.branches) - 1
            if node.kind == "fork":
                yield f"{deeper}{'└─' if end else '├─'} [{number}]"
                yield from _draw(inner, deeper + ("   " if end else "│  "))
            else:
                yield from _draw(inner, deeper)


def _describe(node: Node) -> str:
    if node.kind == "text":
        shown = node.detail if len(node.detail) <= 60 else node.detail[:57] + "..."
        return f"text {shown!r}"
    if node.kind in ("gen", "select"):
        return f"{node.kind} {node.name or '(unnamed)'}" + (
            f" ({node.detail})" if node.detail else ""
        )
    if node.kind == "value":
        return f"value of {node.detail}"
    if node.kind == "ids":
        return f"{node.detail} token ids"
    return f"{node.kind} {node.detail}"
