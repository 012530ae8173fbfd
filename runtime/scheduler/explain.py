"""Why a prompt matches as far as it does, and no further."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from rootlace.runtime.cache import Node, RadixTree
from rootlace.wire.cache_report import CacheReport, Reason, Scope

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
