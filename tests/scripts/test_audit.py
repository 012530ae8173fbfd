"""What is said of pip-audit's findings."""

from typing import Any

import pytest

from scripts.audit import report

FINE = {"name": "a", "version": "1", "vulns": []}
HOLE = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
MISSED = {"name": "c", "skip_reason": "Dependency not found on PyPI: c (3)"}
LOCAL = {"name": "torch", "skip_reason": "Dependency not found on PyPI: torch (2.9+cpu)"}
OWN = {"name": "rootlace", "skip_reason": "Dependency not found on PyPI: rootlace (1)"}


@pytest.mark.parametrize(
    ("found", "good", "said"),
    [
        ([FINE, LOCAL, OWN], True, "1 of 2 packages"),
        ([FINE, HOLE], False, "b 2: PYSEC-1, mended in 2.1"),
        ([FINE, MISSED], False, "nothing about 1: c"),
        ([MISSED, OWN], False, "NOTHING WAS AUDITED"),
        ([], False, "0 of 0"),
    ],
)
def test_report(found: list[dict[str, Any]], good: bool, said: str) -> None:
    lines, fine = report({"dependencies": found, "fixes": []})
    assert fine == good
    assert said in "\n".join(lines)
