"""Tracing of a program's graph: its Python runs with symbols in place of values.

Nothing is generated. Missing arguments and all results that a program reads are *references*. A
reference can be joined with text, formatted into it and appended. If the program's Python needs an
actual value (to compare or convert), tracing stops there with the reason.
"""

from __future__ import annotations

import contextvars
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, NoReturn

from rootlace.language.definition import Definition
from rootlace.language.expressions import (
    Appendable,
    Expression,
    Gen,
    ImagePart,
    RoleBegin,
    RoleEnd,
    Select,
    TokenIds,
    items,
)
from rootlace.language.failures import Site, call_site
from rootlace.language.state import AsyncProgramState, ProgramState, State
from rootlace.language.tools import Tools
from rootlace.language.transcript import SettledBranch
from rootlace.language.variables import Constant, Readable, refuses_use
from rootlace.wire import chat_format, protocol
from rootlace.wire.chat_format import PLAIN
from rootlace.wire.tool_calls import write_list

# Graph --------------------------------------------------------------------------------------------
#
# A program as a graph: what `Function.trace` gives.


Kind = Literal["text", "ids", "image", "role", "value", "gen", "select", "fork", "join", "call"]


@dataclass(eq=False)
class Node:
    """Operation of a program. `uses` are nodes whose values it needs, besides the previous one.
    `detail` describes it; `branches` are the forks of a fork and the program of a call."""

    id: int
    kind: Kind
    detail: str
    site: Site
    name: str | None = None
    uses: tuple[Node, ...] = ()
    branches: tuple[BranchGraph, ...] = ()


@dataclass(eq=False)
class BranchGraph:
    """Nodes of one branch in order, and the variables that the branch names."""

    nodes: list[Node] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Trace:
    """Graph of a program; `str()` draws it as a tree, and `save(path)` as a page.

    `prefix` is the text with which every run of the program starts. `stopped` is the place and
    reason of an early end, or "".
    """

    name: str
    root: BranchGraph
    prefix: str = ""
    stopped: str = ""

    @property
    def nodes(self) -> list[Node]:
        """Return all nodes, forks' included, in the order in which the program made them."""
        return sorted(_walk(self.root), key=lambda node: node.id)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Return pairs (id of a node, id of a node that needs it)."""
        return sorted(_edges(self.root, None))

    @property
    def variables(self) -> list[str]:
        """Return the names of the program's variables, in order."""
        return list(self.root.variables)

    def to_html(self) -> str:
        """Return one self-contained page: branches side by side, from top to bottom."""
        from rootlace.timeline import graph_page

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
    """Yield the branch as HTML: nodes from top to bottom, the forks of a node side by side."""
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


# Tracer -------------------------------------------------------------------------------------------


# Unicode noncharacters: no text of a program has them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class StopTracing(BaseException):
    """End of a trace. Not an Exception: programs must not catch it."""


def _stops(reason: str) -> Callable[..., NoReturn]:
    """Return a method that stops the trace at the calling line."""

    def stop(*_: object) -> NoReturn:
        raise StopTracing(f"{call_site()} {reason}")

    return stop


@refuses_use
class Reference(Expression):
    """Unknown value of a traced program: an argument, or a generated value.

    A reference can be joined with text, put into f-strings, appended, indexed and passed on. Any
    other use stops the trace.
    """

    __slots__ = ("label", "node", "site")

    def __init__(self, label: str, node: Node | None = None) -> None:
        self.label = label
        self.node = node
        self.site = call_site()

    def __getitem__(self, key: object) -> Reference:
        return Reference(f"{self.label}[{key!r}]", self.node)

    def __repr__(self) -> str:
        return f"<{self.label}>"

    def __str__(self) -> str:
        branch = tracing()
        return branch.tracer.mark(self) if branch is not None else self._used()

    def __format__(self, spec: str) -> str:
        return self._used() if spec else str(self)

    def _used(self, *_: object, **__: object) -> NoReturn:
        raise StopTracing(f"{call_site()} needs the value of {self.label}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._used()


class _Symbol(Constant):
    """Variable of a traced program."""

    def meta(self) -> Any:
        return Reference(f"meta information of {self.value.label}")


class TracedBranch(SettledBranch):
    """Branch of a traced program: records operations, never waits, and returns references."""

    def __init__(self, tracer: Tracer, parent: TracedBranch | None = None) -> None:
        self.tracer = tracer
        self.variables: dict[str, Readable] = dict(parent.variables) if parent else {}
        self._inherited: Mapping[str, Readable] = dict(self.variables)
        self.graph = BranchGraph(variables=self.variables)
        self._roles: list[str] = list(parent._roles) if parent else []

    def append(self, expression: Appendable) -> None:
        for item in items(expression):
            self._append_one(item)

    def _append_one(self, item: Appendable) -> None:
        if isinstance(item, str):
            for piece in self.tracer.split(item):
                if isinstance(piece, str):
                    self._text([protocol.Text(piece)])
                else:
                    self._append_one(piece)
        elif isinstance(item, RoleBegin):
            self._text(chat_format.begin(self.tracer.chat, item.role, bool(self._roles)))
            self._roles.append(item.role)
            self._add("role", f"{item.role} {{", item.site)
        elif isinstance(item, RoleEnd):
            self._add("role", f"}} {item.role}", item.site)
            self._text(chat_format.end(self.tracer.chat, item.role))
        elif isinstance(item, Tools):
            listing = write_list(self.tracer.chat.tools, [each.definition() for each in item])
            self._text([protocol.Text(text, special) for text, special in listing])
        else:
            self.tracer.leave_prefix()
            if isinstance(item, Gen):
                options = ", ".join(f"{key}={value!r}" for key, value in item.options.items())
                self._named("gen", item.name, options, item.site)
            elif isinstance(item, Select):
                options = f"{list(item.choices)!r}, {item.method}"
                self._named("select", item.name, options, item.site)
            elif isinstance(item, TokenIds):
                self._add("ids", str(len(item.ids)), item.site)
            elif isinstance(item, ImagePart):
                self._add("image", item.part.url or item.part.media_type, item.site)
            elif isinstance(item, Reference):
                uses = (item.node,) if item.node else ()
                self._add("value", item.label, item.site, uses=uses)
            else:
                raise TypeError(f"{item!r} cannot be traced")

    def _text(self, texts: list[protocol.Text]) -> None:
        for text in texts:
            if not text.text:
                continue
            if self.tracer.in_prefix:
                self.tracer.prefix.append(text)
            if not text.special:
                self._add("text", text.text, call_site())

    def _named(self, kind: Kind, name: str | None, detail: str, site: Site) -> None:
        node = self._add(kind, detail, site, name=name)
        if name is not None:
            self.variables[name] = _Symbol(Reference(name, node))

    def _add(
        self,
        kind: Kind,
        detail: str,
        site: Site,
        *,
        name: str | None = None,
        uses: tuple[Node, ...] = (),
        branches: Sequence[TracedBranch] = (),
    ) -> Node:
        graphs = tuple(branch.graph for branch in branches)
        number = self.tracer.number()
        node = Node(number, kind, self.tracer.plain(detail), site, name, uses, graphs)
        self.graph.nodes.append(node)
        return node

    def fork(self, size: int, adapter: str | None = None) -> list[TracedBranch]:
        self.tracer.leave_prefix()
        branches = [TracedBranch(self.tracer, self) for _ in range(size)]
        self._add("fork", str(size), call_site(), branches=branches)
        return branches

    def join(self, forks: Sequence[TracedBranch], mode: str) -> None:
        ends = tuple(fork.graph.nodes[-1] for fork in forks if fork.graph.nodes)
        node = self._add("join", mode, call_site(), uses=ends)
        if mode == "gather_variable":
            for fork in forks:
                for name, variable in fork.variables.items():
                    if variable is not fork._inherited.get(name):
                        self.variables[name] = _Symbol(Reference(name, node))

    def scope(self, name: str, defaults: Mapping[str, Any]) -> TracedBranch:
        inner = TracedBranch(self.tracer)
        inner._roles = self._roles
        self._add("call", name, call_site(), branches=[inner])
        return inner

    def set_variable(self, name: str, value: Any) -> None:
        self.variables[name] = Constant(value)

    take_offer = _stops("calls tools")
    called = _stops("called a tool")
    timeline = _stops("asks when it did what")
    go_back = become = _stops("goes on as another branch")
    saved = _stops("saves the state")
    restore = _stops("goes on from a state that has ended")
    follow = follow_async = _stops("needs the text as it is generated")

    def mark(self) -> TracedBranch:
        return TracedBranch(self.tracer, self)

    def drop(self) -> None:
        pass

    def position(self) -> int:
        return len(self.graph.nodes)

    def name_from(self, position: int, name: str) -> None:
        last = self.graph.nodes[-1] if self.graph.nodes else None
        self.variables[name] = _Symbol(Reference(name, last))

    def call(self, function: Definition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Trace a called program as a part of this trace."""
        self.tracer.leave_prefix()
        own = {name: value for name, value in kwargs.items() if name not in ("backend", "stream")}
        values, _ = function.split(own)
        inner = TracedBranch(self.tracer)
        self._add("call", function.name, call_site(), branches=[inner])
        return _run(function, inner, args, values)

    def find(self, name: str) -> Readable:
        self.tracer.leave_prefix()
        return self.variables.get(name) or _Symbol(Reference(name))

    def text(self) -> Any:
        self.tracer.leave_prefix()
        return Reference("the text so far")

    def messages(self) -> Any:
        self.tracer.leave_prefix()
        return Reference("the messages so far")


class Tracer:
    """Trace in progress: numbers nodes and collects the constant prefix."""

    def __init__(self, chat: protocol.ChatFormat, prefix_only: bool = False) -> None:
        self.chat = chat
        self.in_prefix = True
        self.prefix: list[protocol.Text] = []
        self._prefix_only = prefix_only
        self._last = 0
        self._marked: list[Reference] = []

    def number(self) -> int:
        self._last += 1
        return self._last

    def mark(self, reference: Reference) -> str:
        """Return a placeholder of `reference` inside a string, until the string is appended."""
        self._marked.append(reference)
        return f"{_OPEN}{len(self._marked) - 1}{_CLOSE}"

    def split(self, text: str) -> list[str | Reference]:
        """Split `text` at its placeholders, which become references again."""
        pieces = _MARK.split(text)
        return [
            self._marked[int(piece)] if index % 2 else piece for index, piece in enumerate(pieces)
        ]

    def plain(self, text: str) -> str:
        """Return `text` in readable form."""
        return _MARK.sub(lambda mark: repr(self._marked[int(mark[1])]), text)

    def leave_prefix(self) -> None:
        """End the constant prefix: later text differs from run to run."""
        self.in_prefix = False
        if self._prefix_only:
            raise StopTracing("the constant prefix has ended")


_current: contextvars.ContextVar[TracedBranch | None] = contextvars.ContextVar(
    "rootlace_trace", default=None
)


def tracing() -> TracedBranch | None:
    """Return the branch under trace in this context, if any."""
    return _current.get()


def trace(function: Definition, args: Sequence[Any], values: Mapping[str, Any]) -> Trace:
    """Implement `Function.trace`."""
    tracer = Tracer(PLAIN)
    root = TracedBranch(tracer)
    result = Trace(function.name, root.graph)
    try:
        _run(function, root, args, values)
    except StopTracing as reason:
        result.stopped = str(reason)
    except Exception as error:
        # The fault may lie in the program or in our references. Keep the findings so far.
        files = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if not frame.f_globals.get("__name__", "").startswith("rootlace.")
        ]
        result.stopped = f"{files[-1] if files else function.name} raised {error!r}"
    result.prefix = "".join(text.text for text in tracer.prefix)
    return result


def constant_prefix(
    function: Definition, chat: protocol.ChatFormat, common: Mapping[str, Any] | None = None
) -> list[protocol.Text]:
    """Return the text that every run of the program with the arguments `common` should start with.

    The program's Python runs up to the first operation that is not constant, or fails. The result
    is a hint: it is compared with each program's actual text.
    """
    tracer = Tracer(chat_format.usable(chat), prefix_only=True)
    try:
        _run(function, TracedBranch(tracer), (), common or {})
    except (StopTracing, Exception):
        return tracer.prefix
    return tracer.prefix


def _run(
    function: Definition, branch: TracedBranch, args: Sequence[Any], values: Mapping[str, Any]
) -> State:
    merged = {**function.bind_arguments, **values}
    for name in function.required[len(args) :]:
        merged.setdefault(name, Reference(name))
    state = AsyncProgramState(branch) if function.is_async else ProgramState(branch)
    token = _current.set(branch)
    try:
        outcome = function.func(state, *args, **merged)
        state.ret_value = _drive(outcome) if inspect.iscoroutine(outcome) else outcome
    finally:
        _current.reset(token)
    return state


def _drive(coroutine: Any) -> Any:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    finally:
        coroutine.close()
    raise StopTracing("the program waits for something other than its state")
