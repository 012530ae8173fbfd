"""The engines that `benchmarks.constrained` compares, behind one face: compile, mask, advance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rootlace.wire.protocol import Constraint

Kind = str
"""`regex` or `json_schema`."""


class Walker(Protocol):
    """One text under way."""

    def fill(self, out: np.ndarray) -> None:
        """The packed mask of allowed tokens, int32."""

    def advance(self, token_id: int) -> bool: ...

    def forced(self) -> int:
        """How many tokens are forced here."""


class Engine(Protocol):
    """`compile` uses nothing of an earlier call; `again` may. Both raise for what is refused."""

    def compile(self, kind: Kind, source: str) -> Callable[[], Walker]: ...

    def again(self, kind: Kind, source: str) -> None: ...


class _Ours:
    """A matcher of ours as a walker."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.advance = matcher.advance

    def fill(self, out: np.ndarray) -> None:
        """As the engine does: a row that is there is only named, not copied."""
        if self._matcher.mask_row() is None:
            self._matcher.fill_bitmask(out)
        else:
            self._matcher.prepare_mask()

    def forced(self) -> int:
        return len(self._matcher.forced_tokens())


class Rootlace:
    """Our compiler, restricted to our automaton (`automaton`) or as it is served (`auto`)."""

    def __init__(self, tokenizer: Any, backend: str) -> None:
        from rootlace.runtime.config import ConstraintConfig
        from rootlace.runtime.constrained import GrammarCompiler
        from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary

        vocabulary = Vocabulary.from_tokenizer(tokenizer)
        self.vocab_size = vocabulary.size
        config = ConstraintConfig(backend=backend)  # type: ignore[arg-type]
        self._compiler = GrammarCompiler(vocabulary, config=config)

    def compile(self, kind: Kind, source: str) -> Callable[[], Walker]:
        grammar = self._compiler.build(Constraint(kind, source))  # type: ignore[arg-type]
        return lambda: _Ours(grammar.matcher())

    def again(self, kind: Kind, source: str) -> None:
        self._compiler.compile(Constraint(kind, source))  # type: ignore[arg-type]


class _LLGuidanceWalker:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.advance = matcher.consume_token

    def fill(self, out: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)

    def forced(self) -> int:
        return len(self._matcher.compute_ff_tokens())


class LLGuidance:
    """llguidance as a library: what its own documentation recommends, compact JSON."""

    def __init__(self, tokenizer: Any, _: str) -> None:
        import llguidance.hf

        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer)
        self.vocab_size = self._tokenizer.vocab_size

    def compile(self, kind: Kind, source: str) -> Callable[[], Walker]:
        from llguidance import LLMatcher

        if kind == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        else:
            options = {"whitespace_flexible": False}
            grammar = LLMatcher.grammar_from_json_schema(source, overrides=options)
        prototype = LLMatcher(self._tokenizer, grammar, log_level=0)
        if prototype.is_error():
            raise ValueError(prototype.get_error())
        return lambda: _LLGuidanceWalker(prototype.deep_copy())

    def again(self, kind: Kind, source: str) -> None:
        self.compile(kind, source)  # it has no cache of its own


class _XGrammarWalker:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.advance = matcher.accept_token

    def fill(self, out: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(out.reshape(1, -1))

    def forced(self) -> int:
        return 0  # it knows forced text, but no tokens for it


class XGrammar:
    def __init__(self, tokenizer: Any, _: str) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
        self.vocab_size = info.vocab_size
        self._fresh = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._cached = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, kind: Kind, source: str) -> Callable[[], Walker]:
        grammar = self._with(self._fresh, kind, source)
        return lambda: _XGrammarWalker(self._xgrammar.GrammarMatcher(grammar))

    def again(self, kind: Kind, source: str) -> None:
        self._with(self._cached, kind, source)

    @staticmethod
    def _with(compiler: Any, kind: Kind, source: str) -> Any:
        if kind == "regex":
            return compiler.compile_regex(source)
        return compiler.compile_json_schema(source, any_whitespace=False, separators=(",", ":"))


class _OutlinesWalker:
    def __init__(self, guide: Any) -> None:
        self._guide = guide

    def fill(self, out: np.ndarray) -> None:
        self._guide.write_mask_into(out.ctypes.data, out.size, out.itemsize)

    def advance(self, token_id: int) -> bool:
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, return_tokens=False)
        return True

    def forced(self) -> int:
        return 0


class OutlinesCore:
    """outlines-core as a library, without our sentinel: its index misses tokens (see the docs)."""

    def __init__(self, tokenizer: Any, _: str) -> None:
        import outlines_core
        import outlines_core.json_schema

        from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary

        self._outlines = outlines_core
        ours = Vocabulary.from_tokenizer(tokenizer)
        self.vocab_size = ours.size
        tokens: dict[bytes, list[int]] = {}
        for token_id, data in enumerate(ours.token_bytes):
            if data:
                tokens.setdefault(data, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(ours.eos_token_ids[0], tokens)

    def compile(self, kind: Kind, source: str) -> Callable[[], Walker]:
        if kind == "json_schema":
            build = self._outlines.json_schema.build_regex_from_schema
            source = build(json.dumps(json.loads(source)), "")
        index = self._outlines.Index(source, self._vocabulary)
        return lambda: _OutlinesWalker(self._outlines.Guide(index))

    def again(self, kind: Kind, source: str) -> None:
        self.compile(kind, source)


ENGINES: dict[str, tuple[Callable[[Any, str], Any], str]] = {
    "rootlace (auto)": (Rootlace, "auto"),
    "rootlace (automaton)": (Rootlace, "automaton"),
    "llguidance": (LLGuidance, ""),
    "xgrammar": (XGrammar, ""),
    "outlines-core": (OutlinesCore, ""),
}


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
