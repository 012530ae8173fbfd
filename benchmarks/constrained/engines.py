"""The engines that `benchmarks.constrained` compares, behind one face: compile, mask, advance."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained import GrammarCompiler
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.wire.protocol import Constraint

Kind = str
"""`regex` or `json_schema`."""


@dataclass(frozen=True)
class Walker:
    """One text under way. `fill` writes the packed mask of allowed tokens, int32; `forced` counts
    the tokens that are forced here."""

    fill: Callable[[np.ndarray], object]
    advance: Callable[[int], bool]
    forced: Callable[[], int] = lambda: 0


Make = Callable[[], Walker]


class Engine:
    """`compile` uses nothing of an earlier call; `again` may. Both raise for what is refused."""

    vocab_size: int

    def compile(self, kind: Kind, source: str) -> Make:
        raise NotImplementedError

    def again(self, kind: Kind, source: str) -> None:
        self.compile(kind, source)


class Rootlace(Engine):
    """Our compiler, restricted to our automaton (`automaton`) or as it is served (`auto`)."""

    def __init__(self, tokenizer: Any, backend: str) -> None:
        vocabulary = Vocabulary.from_tokenizer(tokenizer)
        self.vocab_size = vocabulary.size
        config = ConstraintConfig(backend=backend)  # type: ignore[arg-type]
        self._compiler = GrammarCompiler(vocabulary, config=config)

    def compile(self, kind: Kind, source: str) -> Make:
        grammar = self._compiler.build(Constraint(kind, source))  # type: ignore[arg-type]
        return lambda: self._walker(grammar.matcher())

    def again(self, kind: Kind, source: str) -> None:
        self._compiler.compile(Constraint(kind, source))  # type: ignore[arg-type]

    @staticmethod
    def _walker(matcher: Any) -> Walker:
        def fill(out: np.ndarray) -> None:
            """As the engine does: a row that is there is only named, not copied."""
            if matcher.mask_row() is None:
                matcher.fill_bitmask(out)
            else:
                matcher.prepare_mask()

        return Walker(fill, matcher.advance, lambda: len(matcher.forced_tokens()))


class LLGuidance(Engine):
    """llguidance as a library: what its own documentation recommends, compact JSON."""

    def __init__(self, tokenizer: Any, _: str) -> None:
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

    @staticmethod
    def _walker(matcher: Any) -> Walker:
        return Walker(
            lambda out: matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes),
            matcher.consume_token,
            lambda: len(matcher.compute_ff_tokens()),
        )


class XGrammar(Engine):
    """It knows forced text, but no tokens for it."""

    def __init__(self, tokenizer: Any, _: str) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self.vocab_size = info.vocab_size
        self._fresh = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._cached = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, kind: Kind, source: str) -> Make:
        grammar = self._with(self._fresh, kind, source)
        return lambda: self._walker(self._xgrammar.GrammarMatcher(grammar))

    def again(self, kind: Kind, source: str) -> None:
        self._with(self._cached, kind, source)

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


class OutlinesCore(Engine):
    """outlines-core as a library, without our sentinel: its index misses tokens (see the docs)."""

    def __init__(self, tokenizer: Any, _: str) -> None:
        import outlines_core
        import outlines_core.json_schema

        self._outlines = outlines_core
        ours = Vocabulary.from_tokenizer(tokenizer)
        self.vocab_size = ours.size
        tokens: dict[bytes, list[int]] = {}
        for token_id, data in enumerate(ours.token_bytes):
            if data:
                tokens.setdefault(data, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(ours.eos_token_ids[0], tokens)

    def compile(self, kind: Kind, source: str) -> Make:
        if kind == "json_schema":
            build = self._outlines.json_schema.build_regex_from_schema
            source = build(json.dumps(json.loads(source)), "")
        index = self._outlines.Index(source, self._vocabulary)
        return lambda: self._walker(self._outlines.Guide(index))

    @staticmethod
    def _walker(guide: Any) -> Walker:
        def advance(token_id: int) -> bool:
            if not guide.accepts_tokens([token_id]):
                return False
            guide.advance(token_id, return_tokens=False)
            return True

        return Walker(
            lambda out: guide.write_mask_into(out.ctypes.data, out.size, out.itemsize), advance
        )


ENGINES: dict[str, tuple[Callable[[Any, str], Engine], str]] = {
    "rootlace (auto)": (Rootlace, "auto"),
    "rootlace (automaton)": (Rootlace, "automaton"),
    "llguidance": (LLGuidance, ""),
    "xgrammar": (XGrammar, ""),
    "outlines-core": (OutlinesCore, ""),
}


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
