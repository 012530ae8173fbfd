"""The blocks of code in a page of Markdown, and a runner for Python's."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- (\w+)(?:: (.*))? -->")
MODELS = ("embedded", "smollm2")
ADDRESS = "http://127.0.0.1:30000"
"""That of the server in pages."""


@dataclass(frozen=True)
class Block:
    """`line`: number of the first line of code, from 0. `before`: the line above the block, whose
    comment names the block's model (`embedded`, `smollm2`, or `scripted` with the replies by names
    of variables) or says "not run" for another project's code."""

    page: Path
    language: str
    code: str
    line: int
    before: str

    @property
    def model(self) -> str | None:
        """Return the model on which the block runs, from its comment."""
        found = COMMENT.fullmatch(self.before)
        return found[1] if found and found[1] in MODELS else None

    @property
    def claims(self) -> list[str]:
        """Return the output that the block's comments claim."""
        return re.findall(r"^ *print\(.*\)  # (.+)$", self.code, re.MULTILINE)

    @property
    def replies(self) -> dict[str, Any]:
        found = COMMENT.fullmatch(self.before)
        return json.loads(found[2]) if found and found[1] == "scripted" else {}

    @property
    def not_ours(self) -> bool:
        return "not run" in self.before

    def check(self) -> None:
        """Compile the block. Raises SyntaxError."""
        ast.parse(self.code, str(self.page))

    def run(self, names: dict[str, Any], address: str = ADDRESS) -> None:
        """Execute it, with the server of the page at `address`. Errors name the page's line."""
        code = "\n" * self.line + self.code.replace(ADDRESS, address)
        exec(compile(code, str(self.page), "exec", dont_inherit=True), names)


def blocks(page: Path, language: str) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in FENCE.finditer(text):
        if found[1] == language:
            above = text[: found.start()].rstrip()
            line = text[: found.start(2)].count("\n")
            yield Block(page, language, found[2], line, above.rpartition("\n")[2])
