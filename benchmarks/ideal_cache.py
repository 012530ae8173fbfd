"""The best hit rate that any prefix cache could have on a load, by a plain trie of tokens.

Deliberately naive and independent of the runtime's tree: one dictionary per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.workloads import Tokens, Workload


class _Node(dict[int, "_Node"]):
    """A trie's node: the next tokens."""


class IdealCache:
    """An unlimited cache that forgets nothing and is shared from the moment of submission."""

    def __init__(self) -> None:
        self._root = _Node()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def submit(self, prompt: Sequence[int], wanted: int = 1) -> int:
        """Tokens of `prompt` that need not be computed. The last one always must, as its logits are
        what the first new token is sampled from; of others the logits of more are `wanted`."""
        known = min(self._add(prompt), len(prompt) - wanted)
        self.prompt_tokens += len(prompt)
        self.cached_tokens += known
        return known

    def finish(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A request is over: all of it but its very last token has keys and values."""
        self._add([*prompt, *output[:-1]])

    def _add(self, tokens: Sequence[int]) -> int:
        """Put a sequence in; how many of its first tokens were there before."""
        node, known = self._root, 0
        for token in tokens:
            if token in node:
                known += 1
            else:
                node[token] = _Node()
            node = node[token]
        return known


def ideal_hits(workload: Workload, replies: Mapping[str, Tokens]) -> int:
    """Prompt tokens of a workload that need not be computed, each request having been answered with
    its reply."""
    ideal = IdealCache()
    for wave in workload.waves(replies):
        for request in wave:
            ideal.submit(request.prompt)
        for request in wave:
            ideal.finish(request.prompt, replies[request.name])
    return ideal.cached_tokens
