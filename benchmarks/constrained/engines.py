"""The engines that `benchmarks.constrained` compares, with one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler
from rootlace.wire.protocol import Constraint

Kind = str
"""`regex` or `json_schema`."""


@dataclass(frozen=True)
class Walker:
    """A text in progress. `fill` writes the packed mask of allowed tokens, int32; `forced` counts
    the tokens forced here."""

    fill: Callable[[np.ndarray], object]
    advance: Callable[[int], bool]
    forced: Callable[[], int] = lambda: 0


Make = Callable[[], Walker]


class Engine(Protocol):
    """An engine. `compile` uses no cache of earlier calls, `again` may. Refusals are raised."""

    vocab_size: int

    def compile(self, kind: Kind, source: str) -> Make: ...

    def again(self, kind: Kind, source: str) -> object: ...


class Rootlace:
    """Our compiler with one of its backends, or with the server's choice (`auto`)."""

    def __init__(self, tokenizer: Any, backend: Any) -> None:
        self._compiler = GrammarCompiler(tokenizer, config=ConstraintConfig(backend=backend))
        self._compiler.prepare()
        self.vocab_size = self._compiler.vocabulary.size

    def compile(self, kind: Any, source: str) -> Make:
        grammar = self._compiler.build(Constraint(kind, source))
        return lambda: self._walker(grammar.matcher())

    def again(self, kind: Any, source: str) -> object:
        return self._compiler.compile(Constraint(kind, source, "compact"))

    @staticmethod
    def _walker(matcher: Any) -> Walker:
        def fill(out: np.ndarray) -> None:
            """Write a mask like the engine, which names an existing row instead of copying it."""
            if matcher.mask_row() is None:
                matcher.fill_bitmask(out)
            else:
                matcher.prepare_mask()

        return Walker(fill, matcher.advance, lambda: len(matcher.forced_tokens()))


class LLGuidance:
    """llguidance as a library with compact JSON, as its documentation recommends."""

    def __init__(self, tokenizer: Any) -> None:
        import llguidance.hf

        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer)
        self.vocab_size = self._tokenizer.vocab_size

    def compile(self, kind: Kind, source: str) -> Make:
        from llguidance import LLMatcher

        if kind == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        else:
            options = {"whitespace_flexible": False}
            grammar = LLMatcher.grammar_from_json_schema(source, overrides=options)
        prototype = LLMatcher(self._tokenizer, grammar, log_level=0)
        if prototype.is_error():
            raise ValueError(prototype.get_error())
        return lambda: self._walker(prototype.deep_copy())

    again = compile

    @staticmethod
    def _walker(matcher: Any) -> Walker:
        return Walker(
            lambda out: matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes),
            matcher.consume_token,
            lambda: len(matcher.compute_ff_tokens()),
        )


class XGrammar:
    """xgrammar, which knows forced text, but no tokens for it."""

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self.vocab_size = info.vocab_size
        self._matcher = xgrammar.GrammarMatcher
        self._fresh = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._cached = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, kind: Kind, source: str) -> Make:
        grammar = self._with(self._fresh, kind, source)
        return lambda: self._walker(self._matcher(grammar))

    def again(self, kind: Kind, source: str) -> object:
        return self._with(self._cached, kind, source)

    @staticmethod
    def _walker(matcher: Any) -> Walker:
        return Walker(
            lambda out: matcher.fill_next_token_bitmask(out.reshape(1, -1)), matcher.accept_token
        )

    @staticmethod
    def _with(compiler: Any, kind: Kind, source: str) -> Any:
        if kind == "regex":
            return compiler.compile_regex(source)
        return compiler.compile_json_schema(source, any_whitespace=False, separators=(",", ":"))


ENGINES: dict[str, Callable[[Any], Engine]] = {
    "rootlace (auto)": partial(Rootlace, backend="auto"),
    "rootlace (automaton)": partial(Rootlace, backend="automaton"),
    "rootlace (outlines-core)": partial(Rootlace, backend="outlines_core"),
    "llguidance": LLGuidance,
    "xgrammar": XGrammar,
}


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
