"""What compiles the engine's constraints."""

from __future__ import annotations

import gc
import threading

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained import GrammarCompiler
from rootlace.runtime.constrained.service.compilation import CompileService
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.engine.compiling import FIRST
from rootlace.runtime.model.executor.runner import ModelRunner


def prepare(compiler: GrammarCompiler) -> None:
    """Have it learn all that it can before it is asked. That stays, so a full collection of garbage
    need not look at it again: for each token of the vocabulary there are objects, and with 150,000
    the loop stood still for 0.13 s each time."""
    compiler.prepare()
    gc.freeze()


def compile_service(runner: ModelRunner, config: ConstraintConfig) -> CompileService:
    """Compiles for the tokens of the runner's model."""

    def compiler() -> GrammarCompiler:
        tokenizer = runner.config.source.tokenizer_json()
        vocabulary = Vocabulary(tokenizer, runner.vocab_size, list(runner.eos_token_ids))
        compiler = GrammarCompiler(vocabulary, config=config)
        # Whoever comes first needs little of it, and learns that little faster than all.
        threading.Thread(target=prepare, args=(compiler,), name="prepare", daemon=True).start()
        return compiler

    service = CompileService(compiler, config)
    # The first compilation reads the whole vocabulary: that is done now, beside the first requests.
    service.submit(FIRST)
    return service
