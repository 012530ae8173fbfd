"""A chosen backend serves a regular constraint, from the option to the text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl

DATE = r"[0-9]{4}-(0[1-9]|1[0-2])(-[0-9]{2})?"


@rl.function
def dated(s: Any) -> None:
    s += "On " + rl.gen("date", regex=DATE, max_tokens=24, seed=3) + " or on "
    s += rl.gen("day", json_schema={"enum": ["Monday", "Tuesday"]}, max_tokens=24, seed=3)


@rl.function
def answered(s: Any) -> None:
    s += "True or false? " + rl.gen("answer", type=bool, max_tokens=8, seed=3)


@rl.function
def anything(s: Any) -> None:
    s += "Any: " + rl.gen("any", json_schema={}, max_tokens=8)


@pytest.mark.parametrize("backend", ["llguidance", "outlines_core"])
def test_a_backend_serves_what_is_regular(demo_model: Path, backend: str) -> None:
    with rl.Runtime(model=demo_model, threads=1, constraint_backend=backend) as runtime:
        state = dated.run(backend=runtime)
        assert re.fullmatch(DATE, state["date"]), state["date"]
        typed = answered.run(backend=runtime)  # in the model's own dtype
        assert type(typed["answer"]) is bool
        assert state["day"] in ('"Monday"', '"Tuesday"')
        if backend == "llguidance":
            assert anything.run(backend=runtime)["any"]
        else:
            with pytest.raises(rl.ProgramError, match="not regular"):
                anything.run(backend=runtime)
