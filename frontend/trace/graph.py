"""A program as a graph: what `Function.trace` gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from rootlace.language.failures import Site

Kind = Literal["text", "ids", "image", "role", "value", "gen", "select", "fork", "join", "call"]


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
    """What `Function.trace` gives; `str()` draws it as a tree, and `save(path)` as a page.

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

    def to_html(self) -> str:
        """One page that needs nothing else: branches side by side, from top to bottom."""
        from rootlace.timeline.page import graph_page

        rest = f"<p>The rest is unknown: {escape(self.stopped)}</p>" if self.stopped else ""
        return graph_page(
            self.name,
            f"<header><h1>{escape(self.name)}</h1> before it runs</header>\n"
            f"<main>{''.join(_boxes(self.root, 'branch'))}{rest}</main>\n",
        )

    def save(self, path: str | Path) -> None:
        """Write the page to `path`."""
        Path(path).write_text(self.to_html(), encoding="utf-8")

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


def _boxes(branch: BranchGraph, kind: str) -> Iterator[str]:
    """The branch as HTML: nodes from top to bottom, the forks of a node side by side."""
    yield f'<div class="{kind}">'
    for index, node in enumerate(branch.nodes):
        if index:
            yield '<div class="down"></div>'
        shown = escape(_describe(node))
        yield f'<div class="node {node.kind}" title="{escape(str(node.site))}">{shown}</div>'
        if node.branches:
            yield '<div class="down"></div><div class="graph">'
            for inner in node.branches:
                yield from _boxes(inner, "branch inner")
            yield "</div>"
    yield "</div>\n"
