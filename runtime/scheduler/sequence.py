"""A request under way: its tokens, its blocks, and how far it is."""

from __future__ import annotations

import numpy as np

from rootlace.runtime.cache import Node
from rootlace.runtime.scheduler.plan import TokenScores
from rootlace.runtime.scheduler.request import Request


class Sequence:
    """State of one request, from `add` to its last update.

    `tokens[:length]` are prompt and output; the KV of the first `computed` of them is in memory
    once the step under way is done. `table[:table_len]` are its blocks. The handle `node` ends at
    `tree_len <= computed`: the table up to `tree_len // block_size` is that of the tree path, and
    the sequence itself refers to the blocks behind. A *detached* sequence has no handle and refers
    to all its blocks.
    """

    __slots__ = (
        "announced",
        "arrived",
        "cached_tokens",
        "computed",
        "covered",
        "decoding",
        "detached",
        "finished",
        "length",
        "node",
        "number",
        "order",
        "outputs",
        "prefill_only",
        "program",
        "prompt_len",
        "prompt_scores",
        "queued",
        "request",
        "rid",
        "score_from",
        "score_next",
        "stops",
        "table",
        "table_len",
        "tokens",
        "tree_len",
    )

    def __init__(self, request: Request, program: int, number: int, arrived: float) -> None:
        params = request.params
        outputs = 0 if request.output_ids is None else len(request.output_ids)
        self.request = request
        self.rid = request.rid
        self.program = program
        """The cache's id of the request's program."""
        self.number = number
        """Counts requests in order of arrival."""
        self.arrived = arrived
        self.order = -1
        """Counts sequences in order of first admission; kept through retraction."""
        self.queued: float | None = None

        self.prompt_len = len(request.token_ids)
        self.outputs = outputs
        self.length = self.prompt_len + outputs
        self.tokens = np.empty(self.length + 16, np.int32)
        self.tokens[: self.prompt_len] = request.token_ids
        if request.output_ids is not None:
            self.tokens[self.prompt_len : self.length] = request.output_ids
        self.stops = frozenset(params.stop_token_ids)
        matcher = request.matcher
        self.prefill_only = outputs >= self.max_tokens or (
            matcher is not None and matcher.is_finished()
        )

        # The first token has no log-probability; with outputs, the scores were delivered before.
        first = params.prompt_logprobs_from
        self.score_from = self.prompt_len if first is None or outputs else max(first, 1)
        self.score_next = self.score_from
        """The next prompt token to score; `prompt_len` and beyond: none."""
        self.prompt_scores: list[TokenScores] = []

        self.covered = 0
        """Prompt tokens counted so far, as cached or as computed: each counts once."""
        self.cached_tokens = 0
        self.announced = False
        self.finished = False
        self.table = np.empty(0, np.int32)
        self.forget_kv()

    def forget_kv(self) -> None:
        """No KV any more; tokens, scores and counts stay."""
        self.node: Node | None = None
        self.tree_len = 0
        self.computed = 0
        self.table_len = 0
        self.detached = False
        self.decoding = False

    @property
    def max_tokens(self) -> int:
        limit = self.request.params.max_tokens
        assert limit is not None
        return limit

    def append(self, token: int) -> None:
        """Amortised O(1)."""
        if self.length == len(self.tokens):
            # The old buffer stays with the plans that show it.
            self.tokens = np.concatenate((self.tokens, np.empty(self.length, np.int32)))
        self.tokens[self.length] = token
        self.length += 1
        self.outputs += 1

    def reserve_table(self, count: int) -> None:
        """Make `table` at least `count` long."""
        if count > len(self.table):
            grown = np.zeros(max(count, 2 * len(self.table), 8), np.int32)
            grown[: self.table_len] = self.table[: self.table_len]
            self.table = grown

    def extend_table(self, blocks: np.ndarray) -> None:
        end = self.table_len + len(blocks)
        self.reserve_table(end)
        self.table[self.table_len : end] = blocks
        self.table_len = end

    def match_limit(self) -> int:
        """How many tokens may come from the cache: those whose logits nobody wants."""
        limit = self.length if self.prefill_only else self.length - 1
        if self.score_next < self.prompt_len:
            limit = min(limit, self.score_next - 1)
        return limit

    def cover(self, *, cached: bool) -> int:
        """Count the prompt tokens up to `computed` that were not counted yet; returns how many."""
        fresh = min(self.computed, self.prompt_len) - self.covered
        if fresh <= 0:
            return 0
        self.covered += fresh
        if cached:
            self.cached_tokens += fresh
        return fresh

    def __repr__(self) -> str:
        return f"<Sequence {self.rid} computed={self.computed}/{self.length}>"
