"""The best hit rate of any prefix cache on a load, by a plain trie of tokens.

Deliberately naive and independent of the runtime's tree: one dictionary per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.workloads import Tokens, Workload


class _Node(dict[int, "_Node"]):
    """A trie's node: the next tokens."""


class IdealCache:
    """An unlimited cache that forgets nothing and shares prompts from their submission on."""

    def __init__(self) -> None:
        self._root = _Node()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def submit(self, prompt: Sequence[int], wanted: int = 1) -> int:
        """Return the tokens of `prompt` that need no computing. The last token always does, as the
        first new token is sampled from its logits; so do more last tokens if `wanted`."""
        known = min(self._add(prompt), len(prompt) - wanted)
        self.prompt_tokens += len(prompt)
        self.cached_tokens += known
        return known

    def finish(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """End a request: all its tokens but the last have keys and values."""
        self._add([*prompt, *output[:-1]])

    def _add(self, tokens: Sequence[int]) -> int:
        """Add a sequence; return how many of its first tokens were present."""
        node, known = self._root, 0
        for token in tokens:
            if token in node:
                known += 1
            else:
                node[token] = _Node()
            node = node[token]
        return known


def ideal_hits(workload: Workload, replies: Mapping[str, Tokens]) -> int:
    """Return the prompt tokens of a workload that need no computing, if each request is answered by
    its reply."""
    ideal = IdealCache()
    for wave in workload.waves(replies):
        for request in wave:
            ideal.submit(request.prompt)
        for request in wave:
            ideal.finish(request.prompt, replies[request.name])
    return ideal.cached_tokens
