"""Would drafts save more as trees? `python -m benchmarks.draft_trees --model FILE [--json FILE]`.

    chain    the quick brown fox jumps      drafted today
    branch             red hen              another place behind "quick"

Records outputs of the loads of `benchmarks.speculation`, and replays them: with the chains of
today's drafter, with branches beside them, and with drafts by how often each token followed before,
as one path and as trees. Prices are parts of a step of one row, as in `rootlace simulate`; the
clock counts decode steps. A branch costs its tokens and nothing else. A real one also needs a row,
KV of the drafted tokens before it, and a copy of its KV where it is right: figures favour trees.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, progress_bar, table_of
from benchmarks.speculation import LOADS, Load, answering, states_of
from rootlace.runtime.assets import demo_model
from rootlace.runtime.cache.suffix_index import GRAMS, LONGEST, SuffixIndex
from rootlace.runtime.config import SPECULATION_TOKENS
from rootlace.runtime.scheduler.drafter import MAX_DRAFT, Drafter, Recalled
from rootlace.runtime.scheduler.speculation import DOUBT, LEARNT_AT_ONCE
from rootlace.runtime.simulation.trace import Texts

PRICES = (0.02, 0.1, 0.27)
_LONG = (
    "A train leaves at 9:40 and arrives at 13:05. It stops for 12 minutes. How long does it move? "
    "Think step by step.",
    "A box holds 12 eggs. A cook needs 100 eggs. How many boxes must she buy? Think step by step.",
    "Write a Python function that says whether a word is a palindrome, and explain it.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Explain step by step.",
)
STUDIED = LOADS | {"vote of 8, longer answers": Load(answering(_LONG, 160, votes=8))}
_MOST_BRANCHES = 2
"""Behind each token of a chain."""

# Recording ----------------------------------------------------------------------------------------


def record(runtime: rl.Runtime, load: Load) -> Texts:
    """Return prompts and outputs of a load in the form of `read_recorded`."""
    rl.set_default_backend(runtime)
    rl.flush_cache(runtime)
    texts: Texts = []
    for state in states_of(load)[0]:
        text: Any = state.text()
        pieces, begun = text.pieces, 0
        for name in state:
            while pieces[begun] != state[name]:
                begun += 1
            prompt = _tokenize(runtime, "".join(pieces[:begun]))
            output, begun = state.get_meta_info(name)["output_ids"], begun + 1
            texts.append((np.array([*prompt, *output], np.int32), len(prompt)))
    return texts


def _tokenize(runtime: rl.Runtime, text: str) -> list[int]:
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    asked = urllib.request.Request(
        f"{runtime.url}/tokenize", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


# Drafts -------------------------------------------------------------------------------------------

Tokens = tuple[int, ...]
Draft = set[Tokens]
"""Drafted tokens, each as the path that leads to it."""


class Places:
    """Every place behind every gram of the texts: the index of drafts keeps the latest alone."""

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._behind: defaultdict[Tokens, list[tuple[int, int]]] = defaultdict(list)
        self._counts: defaultdict[Tokens, Counter[int]] = defaultdict(Counter)

    def open(self) -> int:
        """Start a text; return its number."""
        self._texts.append([])
        return len(self._texts) - 1

    def learn(self, number: int, tokens: list[int]) -> None:
        """Append `tokens` to a text."""
        text = self._texts[number]
        start = len(text)
        text += tokens
        for size in GRAMS:
            for end in range(max(size, start), len(text)):
                gram = (*text[end - size : end],)
                self._behind[gram].append((number, end))
                self._counts[gram][text[end]] += 1

    def after(self, lately: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Continuations of `lately`: rank of the gram that agreed, and tokens.

        Long grams first, then late places first.
        """
        for rank in reversed(range(len(GRAMS))):
            if len(lately) >= GRAMS[rank]:
                for number, at in reversed(self._behind.get(tuple(lately[-GRAMS[rank] :]), [])):
                    yield rank, self._texts[number][at : at + MAX_DRAFT]

    def followers(self, lately: list[int]) -> tuple[int, Counter[int]] | None:
        """How often each token followed the longest known gram, and the rank of the gram."""
        for rank in reversed(range(len(GRAMS))):
            counts = self._counts.get((*lately[-GRAMS[rank] :],))
            if len(lately) >= GRAMS[rank] and counts is not None:
                return rank, counts
        return None


class Row:
    """An output being decoded. `wrong`, `tried`: decaying counts of `Frequencies`."""

    def __init__(self, text: np.ndarray, prompt: int, recalled: Recalled, places: Places) -> None:
        self.ids = text
        self.tokens: list[int] = text.tolist()
        self.places = places
        self._number = places.open()
        places.learn(self._number, self.tokens[:prompt])
        self._known = self.length = prompt
        self._recalled = recalled
        self._own = recalled.index.open("", text[:prompt])
        self.drafter = Drafter(None, prompt, recalled, self._own)
        self.wrong = self.tried = 0.0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.length

    def before(self, at: int = 0, path: Tokens = ()) -> list[int]:
        """Return the last tokens before the output's next but `at`, and a path behind them."""
        end = self.length + at
        return [*self.tokens[max(end - LONGEST, 0) : end], *path]

    def take(self, count: int) -> None:
        """Add tokens of the output."""
        self.length += count
        self.drafter.follow(self.ids, self.length)
        if self.length - self._own.known >= LEARNT_AT_ONCE or not self.left:
            self._recalled.index.learn(self._own, self.ids[self._own.known : self.length])
            if not self._own.number:
                self.drafter.indexed = None
            self.places.learn(self._number, self.tokens[self._known : self.length])
            self._known = self.length


class Drafts(Protocol):
    def draft(self, row: Row, price: float) -> Draft:
        """Return tokens to draft; `price`: of a token, as a share of the saving by a right one."""

    def learn(self, row: Row, right: int) -> None:
        """Learn from `right` drafted tokens and the one sampled behind them, not yet taken."""


@dataclass
class Branch:
    """Tokens that may follow the first `depth` tokens of the chain.

    `chance`: that the chain is right until there and the first token of the branch is the next.
    """

    depth: int
    rank: int
    chance: float
    tokens: list[int]


@dataclass
class Options:
    """Possible drafts of a row: today's chain, and branches, the likeliest first.

    `chances`: that the chain is right up to each token. `right`: that a token behind a right one
    is. `coming`: the output to come, for `foresight`.
    """

    chain: list[int]
    chances: list[float]
    branches: list[Branch]
    right: float
    price: float
    coming: list[int]

    def whole_chain(self) -> Draft:
        return {tuple(self.chain[: end + 1]) for end in range(len(self.chain))}

    def along(self, branch: Branch, count: int) -> list[Tokens]:
        """Return the first tokens of a branch."""
        start = (*self.chain[: branch.depth],)
        return [(*start, *branch.tokens[: end + 1]) for end in range(count)]

    def likeliest(self) -> list[tuple[float, Tokens]]:
        """Return chance and path of every token, the likeliest first."""
        found = [(chance, (*self.chain[: at + 1],)) for at, chance in enumerate(self.chances)]
        for branch in self.branches:
            for at, path in enumerate(self.along(branch, len(branch.tokens))):
                found.append((branch.chance * self.right**at, path))
        return sorted(found, key=lambda one: -one[0])


Policy = Callable[[Options], Draft]


def likeliest(times: int, options: Options) -> Draft:
    """Return the likeliest tokens: `times` as many as the chain has."""
    return {path for _, path in options.likeliest()[: times * len(options.chain)]}


def worth(options: Options) -> Draft:
    """Return the chain, and tokens of branches that are likely to save more than they cost."""
    likely = {path for chance, path in options.likeliest() if chance > options.price}
    return options.whole_chain() | likely


def foresight(options: Options) -> Draft:
    """Return the chain, and the right tokens of the best branch, which no policy can know."""
    draft = options.whole_chain()
    found = [draft]
    for branch in options.branches:
        same = _same(options.coming[branch.depth :], branch.tokens)
        found.append(draft.union(options.along(branch, same)))
    return max(found, key=lambda one: _right(one, options.coming))


class Chains:
    """Today's chains, with branches as a policy has them."""

    def __init__(self, policy: Policy = Options.whole_chain) -> None:
        self._policy = policy
        self._rates = [0.2, 0.3, 0.4]
        """Share of branches that are right where the chain is wrong, by rank."""
        self._options = Options([], [], [], 0.0, 0.0, [])

    def draft(self, row: Row, price: float) -> Draft:
        drafter = row.drafter
        chain = drafter.draft(min(drafter.worth(price + DOUBT)[0], row.left - 1))
        if not chain:
            return set()
        count, saves = drafter.worth(0.0)
        right = drafter.next_right
        first = saves * (1 - right) / (1 - right**count)
        chances = [first * right**at for at in range(len(chain))]
        coming = row.tokens[row.length :]
        self._options = options = Options(chain, chances, [], right, price, coming)
        if self._policy is Options.whole_chain:
            return self._policy(options)
        for depth, token in enumerate(chain):
            missed = (chances[depth - 1] if depth else 1.0) - chances[depth]
            seen = {token}
            for rank, tokens in row.places.after(row.before(path=(*chain[:depth],))):
                if tokens[0] not in seen:
                    seen.add(tokens[0])
                    chance = missed * self._rates[rank]
                    options.branches.append(Branch(depth, rank, chance, tokens))
                    missed -= chance
                if len(seen) > _MOST_BRANCHES:
                    break
        options.branches.sort(key=lambda branch: -branch.chance)
        return self._policy(options)

    def learn(self, row: Row, right: int) -> None:
        agreed = _same(self._options.coming, self._options.chain)
        if agreed < len(self._options.chain):
            for branch in self._options.branches:
                if branch.depth == agreed:
                    was_right = branch.tokens[0] == self._options.coming[agreed]
                    self._rates[branch.rank] += 0.03 * (was_right - self._rates[branch.rank])
                    break
        self._options.chain = []


class Frequencies:
    """Tokens by their frequency behind the longest known gram, at most `width` behind each."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._known = [0.4, 0.6, 0.75]
        """Share of tokens that followed such a gram before, by rank."""

    def draft(self, row: Row, price: float) -> Draft:
        draft, ahead = Draft(), [(-1.0, Tokens())]
        while ahead and len(draft) <= MAX_DRAFT:
            chance, path = heappop(ahead)
            draft.add(path)
            found = (
                row.places.followers(row.before(path=path)) if len(path) + 1 < row.left else None
            )
            if found is not None:
                rank, counts = found
                here = self._known[rank]
                of_row = 1 - (row.wrong + 4 * (1 - here)) / (row.tried + 4)
                likely = chance * (here + of_row) / 2 / counts.total()
                for token, count in counts.most_common(self._width):
                    if -likely * count > price:
                        heappush(ahead, (likely * count, (*path, token)))
        return draft - {()}

    def learn(self, row: Row, right: int) -> None:
        for at in range(right + 1):
            found = row.places.followers(row.before(at))
            if found is not None:
                rank, counts = found
                known = row.tokens[row.length + at] in counts
                self._known[rank] += 0.02 * (known - self._known[rank])
                row.wrong = 0.95 * row.wrong + (not known)
                row.tried = 0.95 * row.tried + 1


def _same(coming: list[int], tokens: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(coming, tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(coming), len(tokens)))


def _right(draft: Draft, coming: list[int]) -> int:
    """Return the number of drafted tokens that agree with the output."""
    count = 0
    while count < len(coming) and (*coming[: count + 1],) in draft:
        count += 1
    return count


# Replay -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """`seconds`: in steps of one row. `right`: accepted drafted tokens.

    A step of several rows is one step; each row beyond the first costs as much as a drafted token.
    """

    steps: int
    seconds: float
    drafted: int
    right: int


def replay(texts: Texts, price: float, drafts: Drafts, at_once: int = 1) -> Replayed:
    """Decode the outputs in order, several at once."""
    recalled, places = Recalled(SuffixIndex(SPECULATION_TOKENS)), Places()
    waiting, rows = texts[::-1], list[Row]()
    steps, drafted, right, seconds = 0, 0, 0, 0.0
    while waiting or rows:
        while waiting and len(rows) < at_once:
            row = Row(*waiting.pop(), recalled, places)
            row.take(min(row.left, 1))  # the prefill samples one token
            if row.left:
                rows.append(row)
        if not rows:
            continue
        step = 1 + price * (len(rows) - 1)
        steps, seconds = steps + 1, seconds + step
        relative = price * len(rows) / step
        agreed: list[int] = []
        for row in rows:
            draft = {path for path in drafts.draft(row, relative) if len(path) < row.left}
            agreed.append(_right(draft, row.tokens[row.length :]))
            drafts.learn(row, agreed[-1])
            if draft:
                row.drafter.drafted(agreed[-1], (relative + DOUBT) * len(draft))
            drafted, seconds = drafted + len(draft), seconds + price * len(draft)
        for row, count in zip(rows, agreed, strict=True):
            right += count
            row.take(count + 1)
        rows = [row for row in rows if row.left]
    return Replayed(steps, seconds, drafted, right)


POLICIES: dict[str, Policy] = {
    "as many": partial(likeliest, 1),
    "twice": partial(likeliest, 2),
    "worth it": worth,
    "foresight": foresight,
}
WIDTHS = (1, 2, 4)


@dataclass(frozen=True)
class Study:
    """A load at a price: today's chains and other drafts; `faster`: speed over chains."""

    tokens: int
    price: float
    chains: Replayed
    others: dict[str, Replayed]
    faster: dict[str, float]


def study(texts: Texts, price: float, at_once: int) -> Study:
    chains = replay(texts, price, Chains(), at_once)
    others = {name: replay(texts, price, Chains(one), at_once) for name, one in POLICIES.items()}
    for width in WIDTHS:
        others[f"count {width}"] = replay(texts, price, Frequencies(width), at_once)
    faster = {name: chains.seconds / one.seconds for name, one in others.items()}
    tokens = sum(len(text) - prompt for text, prompt in texts)
    return Study(tokens, price, chains, others, faster)


def main() -> None:
    parser = new_parser("draft_trees", __doc__)
    parser.add_argument("--model", type=Path, default=demo_model(), help="a folder or a GGUF file")
    parser.add_argument("--load", nargs="+", choices=STUDIED, default=list(STUDIED))
    args = parser.parse_args()
    console, report = console_of(130), Report("draft_trees", args)
    found: dict[str, list[Study]] = {}
    with rl.Runtime(str(args.model), port=0) as runtime, progress_bar(console) as bar:
        for name in bar.track(args.load, description="loads"):
            texts = record(runtime, STUDIED[name])
            found[name] = [study(texts, price, STUDIED[name].at_once) for price in PRICES]
    columns = {"tokens": "{tokens}", "steps": "{chains[steps]}", "drafted": "{chains[drafted]}"}
    names = (*POLICIES, *(f"count {width}" for width in WIDTHS))
    columns |= {name: f"{{faster[{name}]:.3f}}" for name in names}
    for at, price in enumerate(PRICES):
        rows = {name: asdict(studies[at]) for name, studies in found.items()}
        title = f"A drafted token costs {price} of a step: chains, and other drafts, times as fast"
        console.print(table_of(title, rows, columns))
    report.add("studies", found)
    report.write()


if __name__ == "__main__":
    main()
