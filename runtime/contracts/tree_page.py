"""The radix tree as it is shown: a page of its nodes, and what is pinned in it."""

from __future__ import annotations

import msgspec


class TreeNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """An edge of the tree: the positions `start` to `end` of every sequence through it.

    `head` and `tail` are its first and last tokens (the tail only where the head is not all).
    `parent` is another node's id, 0 at a root. `children` counts all of its own, also those that
    the page leaves out. `from_disk`: so many of its blocks had been given up, and were read back.
    `requests` run through it, `uses` counts those that ever did. `programs` are those that used it
    last and still run. `pins` hold it. `idle_seconds`: since its last use.
    The gateway adds the texts of head and tail, and the `replica` where there are several.
    """

    id: int
    parent: int
    namespace: str
    adapter: str
    start: int
    end: int
    head: tuple[int, ...]
    tail: tuple[int, ...] = ()
    blocks: int = 0
    from_disk: int = 0
    children: int = 0
    requests: tuple[int, ...] = ()
    locked: bool = False
    uses: int = 0
    programs: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    idle_seconds: float = 0.0
    replica: int | None = None
    head_text: str = ""
    tail_text: str = ""


class TreePage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Some nodes, each behind its parent; `complete` if there are no others. `total` nodes with
    `tokens` tokens are in the tree; None where not all of it was asked for."""

    nodes: tuple[TreeNode, ...]
    complete: bool = True
    total: int | None = None
    tokens: int | None = None


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A prompt of so many `tokens` that is held until `seconds_left` are over, unless its pin is
    released before, by its `id`. `node` is where it ends in the tree."""

    id: str
    namespace: str
    adapter: str
    tokens: int
    node: int
    seconds_left: float
