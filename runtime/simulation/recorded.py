"""Recorded texts replayed through the drafter: what drafts from the cache would save.

{"input_ids": [5, 9, 2], "output_ids": [9, 2, 7]}     a request per line, in order of arrival
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rootlace.runtime.cache.suffix_index import SuffixIndex
from rootlace.runtime.config import SPECULATION_TOKENS
from rootlace.runtime.scheduler.drafter import Drafter, Recalled
from rootlace.runtime.scheduler.speculation import LEARNT_AT_ONCE, MARGIN
from rootlace.runtime.simulation.trace import BadTrace, bad, lines_of
from rootlace.wire.protocol import DRAFT_SOURCES

PRICES = (0.05, 0.1, 0.2, 0.3)
"""Costs of a drafted token, as parts of a step of one row."""
FIELDS = ("input_ids", "output_ids")

Texts = list[tuple[np.ndarray, int]]
"""Of each request prompt and output (int32), and the length of the prompt."""


def is_recorded(path: Path) -> bool:
    """Whether the first line of a file has texts. Raises OSError, BadTrace."""
    first = next((line for line in lines_of(path) if line.strip()), "")
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and FIELDS[1] in record


def read_recorded(path: Path) -> Texts:
    """Raises BadTrace with file and line of what is wrong, OSError if the file cannot be read."""
    texts: Texts = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(path, number, f"not JSON: {error}")
        prompt, output = (_ids(path, number, record, name) for name in FIELDS)
        if not prompt:
            bad(path, number, "input_ids must hold a token")
        texts.append((np.array([*prompt, *output], np.int32), len(prompt)))
    if not texts:
        raise BadTrace(f"{path} has no requests")
    return texts


def _ids(path: Path, number: int, record: Any, name: str) -> list[int]:
    ids = record.get(name) if isinstance(record, dict) else None
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        bad(path, number, f"{name} must be a list of token ids")
    return ids


@dataclass(frozen=True)
class Drafted:
    """What drafts save at a price: `speedup` counts decode steps alone, one request at a time.

    `right` and `wrong`: drafted tokens by source.
    """

    price: float
    tokens: int
    steps: int
    speedup: float
    right: dict[str, int]
    wrong: dict[str, int]


def replay(texts: Texts, price: float, capacity: int = SPECULATION_TOKENS) -> Drafted:
    """Decode the outputs one after another, with an index of `capacity` tokens."""
    recalled = Recalled(SuffixIndex(capacity))
    right, wrong = (dict.fromkeys(DRAFT_SOURCES, 0) for _ in range(2))
    tokens, steps, seconds = 0, 0, 0.0
    for text, prompt in texts:
        own = recalled.index.open("", text[:prompt])
        drafter = Drafter(None, prompt, recalled, own)
        drafter.begin(text[:prompt], prompt)
        length, tokens = prompt, tokens + len(text) - prompt
        while length < len(text):
            # The first token comes of the prefill.
            count = drafter.worth(MARGIN * price)[0] if length > prompt else 0
            draft = drafter.draft(min(count, len(text) - length - 1))
            same = np.array(draft, np.int32) == text[length : length + len(draft)]
            agreed = len(draft) if same.all() else int(same.argmin())
            if length > prompt:
                steps, seconds = steps + 1, seconds + 1 + price * len(draft)
            if draft:
                source = DRAFT_SOURCES[drafter.source]
                right[source] += agreed
                wrong[source] += len(draft) - agreed
                drafter.drafted(agreed, MARGIN * price * len(draft))
            length += agreed + 1
            drafter.follow(text, length)
            if length - own.known >= LEARNT_AT_ONCE:
                recalled.index.learn(own, text[own.known : length])
                if not own.number:  # the index has dropped it
                    drafter.own = None
        recalled.index.learn(own, text[own.known :])
    plain = sum(max(len(text) - prompt - 1, 0) for text, prompt in texts)
    return Drafted(price, tokens, steps, plain / seconds if seconds else 1.0, right, wrong)
