"""Compiler made at the first constraint: its futures end as those of the service itself."""

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.engine import constraints
from rootlace.runtime.engine.constraints import LateCompiler
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint, ServerUnavailable
from rootlace.wire.protocol import Constraint

LETTERS = {"<eos>": 0} | {chr(ord("A") + i): i + 1 for i in range(26)}


class Made:
    """Maker of compilers on permission, with a count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.compilers = threading.Event(), list[GrammarCompiler]()
        self.fault: Exception | None = None
        monkeypatch.setattr(constraints, "_compiler", self.make)
        self.compiler = LateCompiler(None, ConstraintConfig())  # type: ignore[arg-type]

    def make(self, *_: Any) -> GrammarCompiler:
        assert self.go.wait(60)
        if self.fault is not None:
            raise self.fault
        tokenizer = Tokenizer(models.BPE(vocab=LETTERS, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        self.compilers.append(GrammarCompiler(Vocabulary(tokenizer.to_str(), len(LETTERS), [0])))
        return self.compilers[-1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def test_one_compiler_for_all_that_came_meanwhile(made: Made) -> None:
    one, other = Constraint("regex", "A+"), Constraint("regex", "B+")
    compiler = made.compiler
    assert compiler.cached(one) is None
    futures = [compiler.submit(each, "somebody") for each in (one, other, one)]
    assert not any(future.done() for future in futures)
    made.go.set()
    found = [future.result(60) for future in futures]
    assert len(made.compilers) == 1 and found[0] is found[2] is not found[1]
    assert compiler.cached(one) is found[0] and compiler.submit(one).result(60) is found[0]
    assert compiler.vocabulary.size == len(LETTERS)
    compiler.close()


def test_what_does_not_compile_says_why(made: Made) -> None:
    made.go.set()
    for _ in range(2):
        with pytest.raises(InvalidConstraint, match="regex"):
            made.compiler.submit(Constraint("regex", "(")).result(60)
    made.compiler.close()


def test_a_compiler_that_cannot_be_made_is_tried_again(made: Made) -> None:
    made.fault = OSError("no memory")
    made.go.set()
    futures = [made.compiler.submit(Constraint("regex", "A")) for _ in range(2)]
    for future in futures:
        with pytest.raises(OSError, match="no memory"):
            future.result(60)
    made.fault = None
    assert made.compiler.submit(Constraint("regex", "A")).result(60) is not None
    made.compiler.close()


def test_closed_before_there_is_one(made: Made) -> None:
    made.compiler.close()
    made.go.set()
    with pytest.raises(ServerUnavailable):
        made.compiler.submit(Constraint("regex", "A")).result(60)
