"""What the engine says of the cache in token ids, with texts beside them."""

from __future__ import annotations

import msgspec
import numpy as np

from rootlace.runtime.contracts.tree_page import TreePage
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.wire.cache_report import CacheReport

SHOWN = 12
"""So many tokens on either side of where a match ended are shown as text."""


def with_texts(
    report: CacheReport, prompt: np.ndarray, tokenizer: Tokenizer, advice: str = ""
) -> CacheReport:
    """The report on `prompt` (int32), with the texts around where the match ended. A character
    whose tokens were cut apart there shows as U+FFFD."""
    at = report.matched
    if report.reason in ("whole", "scored", "disabled"):
        return report

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return msgspec.structs.replace(
        report,
        before=text(prompt[max(at - SHOWN, 0) : at].tolist()),
        goes_on=text(prompt[at : at + SHOWN].tolist()),
        cached_instead=text(list(report.instead[:SHOWN])),
        advice=advice,
    )


def page_with_texts(page: TreePage, tokenizer: Tokenizer) -> TreePage:
    """The page, with the texts of its nodes' ends."""
    nodes = tuple(
        msgspec.structs.replace(
            node,
            head_text=tokenizer.decode(node.head, skip_special_tokens=False),
            tail_text=tokenizer.decode(node.tail, skip_special_tokens=False),
        )
        for node in page.nodes
    )
    return msgspec.structs.replace(page, nodes=nodes)
