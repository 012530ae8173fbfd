"""The first changes that CONTRIBUTING.md shows can be made as they are written."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.first_changes import PRODUCT, ROOT, DoesNotWork, FirstChange, first_changes

CHANGES = {change.title: change for change in first_changes((ROOT / "CONTRIBUTING.md").read_text())}
MOST = {"A sampling penalty": 4, "An eviction policy": 2, "A response field from the engine": 4}
"""Files of the product that a change of the kind may touch."""


def test_all_kinds_are_shown() -> None:
    assert CHANGES.keys() == MOST.keys()


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_diff_applies_and_compiles(change: FirstChange) -> None:
    change.check()


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_is_small_and_brings_its_test(change: FirstChange) -> None:
    product = [name for name in change.changed if name.startswith(PRODUCT)]
    assert 0 < len(product) <= MOST[change.title], product
    tests = [name for name in change.changed if name.startswith("tests/")]
    added = [name for name in tests if not (ROOT / name).exists()]
    assert added, "the change has no test of its own"
    assert all(any(name in command for command in change.commands) for name in added)
    assert len(change.prose.splitlines()) <= 20


def test_what_does_not_work_is_told() -> None:
    change = CHANGES["An eviction policy"]
    stale = replace(change, diff=change.diff.replace('["lru"', '["lru-k"'))
    with pytest.raises(DoesNotWork, match=r"An eviction policy: the diff does not apply: .*config"):
        stale.check()
    wrong = replace(change, diff=change.diff.replace("+from tests", "+from from tests"))
    with pytest.raises(DoesNotWork, match=r"An eviction policy: \S+: invalid syntax"):
        wrong.check()
    with pytest.raises(DoesNotWork, match="no section"):
        first_changes("# Contributing\n")


@pytest.mark.slow
def test_a_failing_test_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    failing = replace(CHANGES["An eviction policy"], commands=("python -c 'assert False'",))
    with pytest.raises(DoesNotWork, match="ended with 1"):
        failing.run()
    assert "AssertionError" in capfd.readouterr().err


def test_the_tree_stays_as_it_is() -> None:
    for change in CHANGES.values():
        for name in change.changed:
            assert Path(name).parts[0] in ("frontend", "runtime", "kernels", "tests", "docs")
