"""Start the compile service of an engine. Imported late: what compiles is heavy."""

from __future__ import annotations

import gc
import threading

from rootlace.runtime import processes
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.sandbox import CompileService
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary


def prepare(compiler: GrammarCompiler) -> None:
    """Prepare all tables of the compiler, and exempt them from garbage collection.

    Each token of the vocabulary has objects: with 150,000 tokens a full collection stopped the loop
    for 0.13 s.
    """
    compiler.prepare()
    gc.freeze()
    processes.give_back_memory()


def compile_service(runner: ModelRunner, config: ConstraintConfig) -> CompileService:
    """A compile service for the tokens of the runner's model.

    The first constraint waits until the vocabulary is read (a second; `--warm-up` has it read at
    the start). Its tables take as much memory as a small model's weights, and many servers never
    get a constraint.
    """

    def compiler() -> GrammarCompiler:
        tokenizer = runner.config.source.tokenizer_json()
        vocabulary = Vocabulary(tokenizer, runner.vocab_size, list(runner.eos_token_ids))
        compiler = GrammarCompiler(vocabulary, config=config)
        # Early requests need few of the tables, and build these faster than all.
        threading.Thread(target=prepare, args=(compiler,), name="prepare", daemon=True).start()
        return compiler

    return CompileService(compiler, config)
