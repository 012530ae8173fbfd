"""Compile constraints for an engine, from the first constraint on.

The compiler takes a fifth of a second to import, and 10 MB. The vocabulary of a model takes at
least as much again. Many servers never get a constraint.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from rootlace.runtime import processes
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.protocol import Constraint

if TYPE_CHECKING:
    from rootlace.runtime.structured import GrammarCompiler
    from rootlace.runtime.structured.sandbox import CompileService
    from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary


class LateCompiler:
    """Compiler that makes its `CompileService` at the first constraint, on a thread: the loop goes
    on meanwhile. Thread-safe."""

    def __init__(self, runner: ModelRunner, config: ConstraintConfig) -> None:
        self._runner = runner
        self._config = config
        self._lock = threading.Lock()
        self._service: CompileService | None = None
        self._waiting: list[tuple[Constraint, str, Future[Grammar]]] = []
        """Constraints to compile once the service exists."""
        self._closed = False

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary, once a constraint is compiled."""
        assert self._service is not None
        return self._service.compiler.vocabulary

    def cached(self, constraint: Constraint) -> Grammar | None:
        """Return the grammar of a constraint if it is compiled already."""
        return None if self._service is None else self._service.compiler.cached(constraint)

    def submit(self, constraint: Constraint, client: str = "") -> Future[Grammar]:
        """Submit a constraint; see `CompileService.submit`."""
        with self._lock:
            if self._service is None:
                future: Future[Grammar] = Future()
                self._waiting.append((constraint, client, future))
                if len(self._waiting) == 1:
                    threading.Thread(target=self._begin, name="compiler", daemon=True).start()
                return future
        return self._service.submit(constraint, client)

    def close(self) -> None:
        """End the service, if there is one."""
        with self._lock:
            self._closed = True
        if self._service is not None:
            self._service.close()

    def _begin(self) -> None:
        try:
            compiler = _compiler(self._runner, self._config)
            # Late import: see above.
            from rootlace.runtime.structured.sandbox import CompileService

            service = CompileService(compiler, self._config)
        except BaseException as error:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for *_, future in waiting:
                future.set_exception(error)
            return
        with self._lock:
            if self._closed:
                service.close()  # the service refuses waiting constraints
            waiting, self._waiting, self._service = self._waiting, [], service
        for constraint, client, future in waiting:
            _follow(future, service, constraint, client)
        # The first requests need few of the tables, and build these faster than all.
        wait([future for *_, future in waiting])
        prepare(compiler)


def _follow(
    future: Future[Grammar], service: CompileService, constraint: Constraint, client: str
) -> None:
    """Complete `future` with the result of the service's own future."""

    def settle(done: Future[Grammar]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)

    try:
        service.submit(constraint, client).add_done_callback(settle)
    except Exception as error:
        future.set_exception(error)


def _compiler(runner: ModelRunner, config: ConstraintConfig) -> GrammarCompiler:
    """Return a compiler for the tokens of the runner's model. The first constraint waits until the
    vocabulary is read (half a second; `--warm-up` has it read at the start)."""
    from rootlace.runtime.structured import GrammarCompiler
    from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary

    tokenizer = runner.config.source.tokenizer_json()
    vocabulary = Vocabulary(tokenizer, runner.vocab_size, list(runner.eos_token_ids))
    # Python keeps thousands of small tuples and dicts for later objects, spread over the memory of
    # the JSON. That memory could then not be returned.
    gc.collect()
    return GrammarCompiler(vocabulary, config=config)


def prepare(compiler: GrammarCompiler) -> None:
    """Prepare all tables of the compiler, and exempt the tables from garbage collection. Each token
    of the vocabulary has objects: with 150,000 tokens a full collection stopped the loop for 0.13
    s."""
    compiler.prepare()
    gc.freeze()
    processes.give_back_memory()
