"""Compilation beside the loop: what is hostile fails alone, within its bounds."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import Grammar, GrammarCompiler, sandbox
from rootlace.runtime.structured.sandbox import QUICK_SECONDS, CompileService, is_suspicious
from rootlace.wire.errors import InvalidConstraint, ServerUnavailable
from rootlace.wire.protocol import Constraint
from rootlace.wire.tool_calls import among_text, arguments
from tests.waiting import eventually

# What compiles at all takes a twentieth of it.
CONFIG = ConstraintConfig(compile_seconds=1.0, compile_memory_bytes=256 << 20)
PATIENT = ConstraintConfig(compile_seconds=100.0)
HASTY = ConstraintConfig(compile_seconds=0.5, compile_memory_bytes=256 << 20)
"""For what never ends: who sleeps is given five seconds."""


def make_compiler(config: ConstraintConfig = CONFIG) -> GrammarCompiler:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarCompiler(tokenizer, eos_token_ids=[0], config=config)


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[CompileService]:
    service = CompileService(make_compiler(), getattr(request, "param", CONFIG))
    yield service
    service.close()


def schema(value: object) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def failure(future: Future[Grammar]) -> str:
    with pytest.raises(InvalidConstraint) as caught:
        future.result(timeout=60)
    return str(caught.value)


# One per way of being hostile, none of which may hang, and what becomes of it.
REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % 500}"} for i in range(500)}
TREE = {
    f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
    for i in range(40)
}
HOSTILE = {
    "exponential regex": Constraint("regex", "(a|b)*a(a|b){40}(c|(a|b)*a(a|b){60})"),
    "exponential look-ahead": Constraint(
        "regex", "".join(f"(?!.*a.{{{n}}}b)(?=.*c.{{{n}}}d)" for n in range(3, 30)) + ".*"
    ),
    "nested counts": Constraint("regex", "(((x{1,100000}){1,100000}){1,100000}){1,100000}"),
    "nested counts in a schema": schema(
        {"type": "string", "pattern": "^((([a-z]{1,100000}y){1,100000}z){1,100000})$"}
    ),
    "a megabyte of properties": schema(
        {"type": "object", "properties": {f"p{i}": {"minimum": i} for i in range(32_000)}}
    ),
    "a megabyte of nesting": Constraint(
        "json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000
    ),
    "a cycle of references": schema({"$defs": REFERENCES, "$ref": "#/$defs/d0"}),
    "a tree of references": schema({"$defs": {**TREE, "d40": {}}, "$ref": "#/$defs/d0"}),
    "a remote reference": schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "a catastrophic pattern": schema({"type": "string", "pattern": "^(([a-z]+)*)*(\\d+)+$" * 9}),
    "a product of alternatives": schema(
        {"allOf": [{"anyOf": [{"required": [f"p{i}_{j}"]} for j in range(12)]} for i in range(12)]}
    ),
    "a large divisor": schema({"type": "integer", "multipleOf": 1_000_003}),
    "a large grammar": Constraint(
        "ebnf",
        "root ::= r0\n"
        + "\n".join(f'r{i} ::= r{i + 1} "a" r{i + 1} | r{i}' for i in range(5_000))
        + '\nr5000 ::= "b"',
    ),
    "large alternatives": Constraint(
        "choices", json.dumps(["".join(f"{i:05d}" for _ in range(2)) for i in range(20_000)])
    ),
}


@pytest.mark.slow
def test_hostile_constraints_fail_alone(service: CompileService) -> None:
    hostile = {name: service.submit(constraint) for name, constraint in HOSTILE.items()}
    ordinary = []
    for i in range(100):
        future = service.submit(Constraint("regex", f"[a-z]{{1,8}}-{i}"))
        assert future.result(timeout=60).matcher().forced_text() == b""
        ordinary.append(future)
    # What was said first is not done yet, but what was said last is.
    assert not all(future.done() for future in hostile.values())
    assert not wait(hostile.values(), timeout=200).not_done
    for name, future in hostile.items():
        error = future.exception()
        # Those that compile after all do work.
        if error is None:
            assert future.result().matcher().allowed_mask().any(), name
        else:
            assert isinstance(error, InvalidConstraint | ServerUnavailable), (name, error)
            assert str(error).startswith(HOSTILE[name].kind), (name, error)


def test_bounds_are_named(service: CompileService) -> None:
    assert "http://127.0.0.1:9/schema.json" in failure(
        service.submit(HOSTILE["a remote reference"])
    )
    assert "nested" in failure(service.submit(HOSTILE["a megabyte of nesting"]))
    assert "max_source_bytes" in failure(service.submit(Constraint("regex", "a" * (2**20 + 1))))


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial's child sleeps over a pattern of many `z` or `v`, computes over many `w`, and takes
    memory for many `y`. Of the time that it is given, it lets little pass over a `v`."""
    script = f"""
import signal, sys, time
from rootlace.runtime.structured import compiler, sandbox_child as trial
build = compiler.GrammarCompiler.build
def slow(self, constraint):
    if "zzz" in constraint.source: time.sleep(1000)
    if "vvv" in constraint.source:
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert 0 < left <= 5, left
        time.sleep(1000)
    while "www" in constraint.source: pass
    if "yyy" in constraint.source: return [bytes({1 << 20}) for _ in range(10**6)]
    if "xxx" in constraint.source: import os; os.abort()
    return build(self, constraint)
compiler.GrammarCompiler.build = slow
trial.main()
"""
    monkeypatch.setattr(
        "rootlace.runtime.processes.child_command",
        lambda module: [__import__("sys").executable, "-c", script],
    )


def long(letter: str) -> Constraint:
    """Just long enough to be tried in the child: compiling it takes a hundredth of a second."""
    return Constraint("regex", letter * 5_000)


@pytest.mark.slow
@pytest.mark.parametrize("service", [HASTY], ids=["hasty"], indirect=True)
def test_time_and_memory_end_with_the_child(service: CompileService, hanging: None) -> None:
    first_error = service.submit(long("v"))  # sleeps
    service.submit(long("a")).result(timeout=60)
    child = service.sandbox_pid
    for future in (first_error, service.submit(long("w"))):
        error = future.exception(timeout=60)
        assert isinstance(error, ServerUnavailable), error
        assert "took too long, try again" in str(error)
    assert "256 MiB of memory (compile_memory_bytes)" in failure(service.submit(long("y")))
    assert "256 MiB of memory (compile_memory_bytes)" in failure(service.submit(long("x")))
    assert service.submit(long("b")).result(timeout=60).matcher().forced_text()
    # The child was not lost with any of them.
    assert service.sandbox_pid == child


class ScriptedSandbox:
    """Runs out of time over a `z`, once the trials of that length are released."""

    def __init__(self, *released: str) -> None:
        self.quick, self.long = threading.Event(), threading.Event()
        self.tried: list[tuple[str, float]] = []
        for name in released:
            getattr(self, name).set()

    def run(self, constraint: Constraint, seconds: float) -> None:
        self.tried.append((constraint.source, seconds))
        if "z" in constraint.source:
            (self.quick if seconds == QUICK_SECONDS else self.long).wait(100)
            raise sandbox.OutOfTime(constraint)

    def tries(self, seconds: float) -> list[str]:
        return [source for source, given in self.tried if given == seconds]

    def close(self) -> None: ...


def scripted(*released: str) -> tuple[CompileService, ScriptedSandbox]:
    service, child = CompileService(make_compiler(), PATIENT), ScriptedSandbox(*released)
    service._sandbox = child  # type: ignore[assignment]
    return service, child


def test_a_quick_constraint_waits_for_no_long_one_and_time_is_no_fault_to_remember() -> None:
    service, child = scripted("quick")
    hanging = service.submit(long("z"))
    assert service.submit(long("a")).result(timeout=60).matcher().forced_text()
    assert not hanging.done()
    child.long.set()
    first = hanging.exception(timeout=60)
    for error in (first, service.submit(long("z")).exception(timeout=60)):
        assert isinstance(error, ServerUnavailable) and error.http_status == 503
        assert str(error) == "regex: compilation took too long, try again"
    assert len(child.tries(QUICK_SECONDS)) == 3 and len(child.tries(100.0)) == 2
    service.close()


@pytest.mark.parametrize("strict", [None, True])
def test_a_lenient_tag_that_takes_too_long_is_served_without_its_schemas(strict: Any) -> None:
    """Once, and then at once."""
    service, child = scripted("quick", "long")
    values = {"type": "object", "properties": {"z": {"enum": ["a" * 20_000]}}, "required": ["z"]}
    calls = [("<f>", arguments(values, strict)), ("<g>", arguments({}, strict))]
    tag = Constraint("structural_tag", json.dumps(among_text(calls, "<", "</f>")))
    for _ in range(2):
        future = service.submit(tag)
        if strict:
            assert isinstance(future.exception(timeout=60), ServerUnavailable)
            continue
        matcher = future.result(timeout=60).matcher()
        byte_tokens = make_compiler().vocabulary.byte_tokens
        assert all(matcher.advance(byte_tokens[byte]) for byte in b"<f>{}</f> so <")
        assert not matcher.advance(byte_tokens[ord("h")])
    assert len(child.tries(100.0)) == (2 if strict else 1)
    service.close()


def test_one_client_with_many_suspicious_constraints_does_not_delay_another() -> None:
    service, child = scripted()
    greedy = [service.submit(long("z" * count), "greedy") for count in range(1, 9)]
    eventually(lambda: child.tried == [(long("z").source, QUICK_SECONDS)])
    polite = service.submit(long("a"), "polite")
    shared = service.submit(long("z" * 8), "third")  # which waited behind all of the first's
    assert shared is greedy[-1]
    eventually(lambda: {"greedy", "polite", "third"} == service._quick._queues.keys())
    child.quick.set()
    assert polite.result(timeout=60).matcher().forced_text()
    eventually(lambda: len(child.tries(QUICK_SECONDS)) == 9)
    assert {long("a").source, long("z" * 8).source} < set(child.tries(QUICK_SECONDS)[:5])
    assert not any(one.done() for one in greedy)
    child.long.set()
    service.close()


@pytest.mark.slow
def test_trials_run_beside_each_other_in_the_one_child(
    service: CompileService, hanging: None
) -> None:
    """A quick one is done while a long one computes, and the child outlives both."""
    service.submit(long("a")).result(timeout=60)
    pid = service.sandbox_pid
    assert pid is not None
    busy = service.submit(long("w"))
    eventually(lambda: len(psutil.Process(pid).children(recursive=True)) == 2)
    service.submit(long("b")).result(timeout=60)
    assert isinstance(busy.exception(timeout=60), ServerUnavailable)
    assert service.sandbox_pid == pid
    eventually(lambda: not psutil.Process(pid).children())


def test_nothing_is_left_behind(hanging: None) -> None:
    service = CompileService(make_compiler(), CONFIG)
    service.submit(long("a")).result(timeout=60)
    pid = service.sandbox_pid
    assert pid is not None
    waiting = service.submit(long("z"))
    service.close()
    with pytest.raises(ServerUnavailable):
        waiting.result(timeout=60)
    with pytest.raises(ServerUnavailable):
        service.submit(Constraint("regex", "later")).result(timeout=60)
    assert service.sandbox_pid is None
    assert not psutil.pid_exists(pid)


def test_the_child_ends_with_its_input(hanging: None) -> None:
    """As it does when the parent is killed: the pipe is closed for it. All forks end, too."""
    service = CompileService(make_compiler(), PATIENT)
    service.submit(long("a")).result(timeout=60)
    pid = service.sandbox_pid
    assert pid is not None
    child = psutil.Process(pid)
    busy = service.submit(long("w"))
    (job,) = service._pending.values()
    quick = set[psutil.Process]()

    def tried_for_long() -> bool:
        """Whether the forks of the second trial run: those of the first may still be there."""
        running = set(child.children(recursive=True))
        if job.lane is not service._long:
            quick.update(running)
        return job.lane is service._long and len(running) == 2 and not running & quick

    eventually(tried_for_long)
    forks = child.children(recursive=True)
    assert service._sandbox._child is not None
    pipe = service._sandbox._child.pipe
    close = pipe._close  # type: ignore[attr-defined]

    def close_slowly() -> None:
        """As a thread does that loses its core just after it has closed."""
        close()
        eventually(busy.done)

    pipe._close = close_slowly  # type: ignore[attr-defined]
    pipe.close()
    _, alive = psutil.wait_procs([child, *forks], timeout=100)
    assert not alive
    assert isinstance(busy.exception(timeout=60), ServerUnavailable)


@pytest.mark.slow
def test_a_child_that_is_gone_is_replaced(service: CompileService) -> None:
    """Its pipe is closed by whoever used it last, not by a collection of garbage."""
    service.submit(long("a")).result(timeout=60)
    child = service._sandbox._child
    assert child is not None
    pipe = weakref.ref(child.pipe)
    os.kill(child.process.pid, signal.SIGKILL)
    del child
    gc.disable()
    try:
        with contextlib.suppress(InvalidConstraint):  # the one that found it gone
            service.submit(long("b")).result(timeout=60)
        assert service.submit(long("c")).result(timeout=60).matcher().forced_text()
        eventually(lambda: pipe() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_bounds_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(msgspec.ValidationError, match="compile_seconds"):
        CompileService(make_compiler(), ConstraintConfig(compile_seconds=seconds))


@pytest.mark.slow
def test_an_ordinary_constraint_that_hangs_gives_its_thread_up() -> None:
    compiler = make_compiler()
    compiler.compile(Constraint("regex", "first"))  # it takes longer than those behind it
    release = threading.Event()
    build = compiler.build

    def slow(constraint: Constraint) -> Grammar:
        while constraint.source == "stuck" and not release.is_set():
            pass
        return build(constraint)

    compiler.build = slow  # type: ignore[method-assign]
    service = CompileService(compiler, HASTY)
    stuck = service.submit(Constraint("regex", "stuck"))
    behind = service.submit(Constraint("regex", "behind"))
    with pytest.raises(ServerUnavailable, match="took too long, try again"):
        stuck.result(timeout=60)
    assert behind.result(timeout=60).backend == "automaton"
    release.set()
    service.close()


def test_who_asks_at_the_same_time_shares_one_compilation() -> None:
    compiler = make_compiler(PATIENT)
    built = []
    gate = threading.Event()
    build = compiler.build

    def counted(constraint: Constraint) -> Grammar:
        gate.wait()
        built.append(constraint)
        return build(constraint)

    compiler.build = counted  # type: ignore[method-assign]
    service = CompileService(compiler, compiler.config)
    one = Constraint("regex", "shared")
    other = Constraint("regex", "shared", jump_forward="off")
    assert compiler.cached(one) is None
    futures = [service.submit(one), service.submit(other)]
    found: list[Grammar] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiler.compile(one))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    gate.set()
    grammars = [future.result(timeout=60) for future in futures]
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert {id(grammar) for grammar in (*grammars, *found)} == {id(grammars[0])}
    assert compiler.cached(other) is grammars[0]
    assert service.submit(Constraint("regex", "shared", strict=True)).result(60) is not grammars[0]
    service.close()


def test_the_first_mask_is_there_before_any_step_wants_it(service: CompileService) -> None:
    grammar = service.submit(Constraint("regex", "[a-z]{3}")).result(timeout=60)
    row = grammar.matcher().mask_row()
    assert row is not None and row.table.filled(row.row)


def test_what_has_no_first_mask_is_refused_when_it_is_compiled() -> None:
    """Not in a step, at each request anew."""
    compiler = make_compiler(PATIENT)
    matcher = SimpleNamespace(allowed_mask=lambda: None, error=lambda: "it has no mask")
    grammar = SimpleNamespace(nbytes=1, matcher=lambda: matcher)
    compiler.build = lambda constraint: grammar  # type: ignore[assignment,method-assign,return-value]
    service = CompileService(compiler, PATIENT)
    assert failure(service.submit(Constraint("regex", "a"))) == "regex: it has no mask"
    service.close()


def test_nothing_of_the_vocabulary_is_left_to_be_made_by_a_step() -> None:
    """It holds the interpreter for a quarter of a second where the vocabulary is large."""
    compiler = make_compiler()
    compiler.prepare()
    assert "llguidance" in vars(compiler.vocabulary)


def many_tools(count: int) -> Constraint:
    """With an optional argument each, as pydantic writes it."""
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "x" * 900}
    properties = {"a": optional, "b": {"$ref": "#/$defs/A"}, "c": {"$ref": "#/$defs/A"}}
    parameters = {"properties": properties, "$defs": {"A": {"allOf": [{"type": "string"}]}}}
    calls = [(f"<f>{i}", arguments(parameters)) for i in range(count)]
    return Constraint("structural_tag", json.dumps(among_text(calls, "<f>", "</f>")))


def test_one_hostile_tool_among_many_is_suspicious() -> None:
    tag = json.loads(many_tools(8).source)
    assert not is_suspicious(Constraint("structural_tag", json.dumps(tag)))
    tag["format"]["tags"][3]["content"]["json_schema"]["pattern"] = "(a{1,99}){1,99}"
    assert is_suspicious(Constraint("structural_tag", json.dumps(tag)))
    assert is_suspicious(many_tools(250))


@pytest.mark.parametrize(
    "name",
    # The others cost nothing to compile: automata are lazy, and nothing is fetched.
    [
        name
        for name in HOSTILE
        if name not in ("exponential regex", "a catastrophic pattern", "a remote reference")
    ],
)
def test_hostile_constraints_are_suspicious(name: str) -> None:
    assert is_suspicious(HOSTILE[name])


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        Constraint("regex", r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}"),
        Constraint("regex", r"\w+([.-]?\w+)*@\w+([.-]?\w+)*(\.\w{2,3})+"),
        Constraint("regex", r".{0,2000}"),
        Constraint("regex", r"(?=.*\d)[a-z0-9]{8,20}"),
        Constraint("choices", json.dumps([f"choice {i}" for i in range(1000)])),
        Constraint("ebnf", 'root ::= "(" root ")" | [a-z]{1,20}'),
        schema(
            {
                "type": "object",
                "properties": {
                    f"p{i}": {"anyOf": [{"type": "string", "maxLength": 2000}, {"type": "null"}]}
                    for i in range(40)
                },
            }
        ),
        schema({"type": "number", "multipleOf": 0.01, "maximum": 1e9}),
        many_tools(64),
    ],
)
def test_ordinary_constraints_are_not_suspicious(constraint: Constraint) -> None:
    assert not is_suspicious(constraint)


def test_blanks_in_a_count_are_scanned_in_linear_time() -> None:
    """It would not end otherwise."""
    blanks = " " * 8_000
    assert not is_suspicious(Constraint("regex", "a{" + blanks + "," + blanks))


def test_a_child_that_could_not_be_started_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no more processes")

    setup: Any = lambda: None  # noqa: E731
    trial = sandbox.Sandbox(setup)
    monkeypatch.setattr(sandbox.subprocess, "Popen", refuse)
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="no more processes") as caught:
        trial.run(Constraint("regex", "a"), 1.0)
    assert psutil.Process().num_fds() == before, caught  # which keeps the frames alive
    trial.close()
    with pytest.raises(ServerUnavailable) as caught:
        trial.run(Constraint("regex", "a"), 1.0)
    assert psutil.Process().num_fds() == before, caught


def test_the_child_ends_when_a_message_does_not_fit() -> None:
    """Otherwise its parent would wait for an answer, and it would not see its parent's end."""
    script = """
import msgspec
from rootlace.runtime.structured import sandbox_child as trial
setup = trial.Setup(trial.ConstraintConfig(), 1, [0], trial.zlib.compress(b""), {})
class Parent:
    messages = [msgspec.msgpack.encode(setup)]
    def recv_bytes(self):
        if not self.messages: raise MemoryError
        return self.messages.pop()
    def send_bytes(self, data): ...
trial.Connection = lambda _: Parent()
trial.GrammarCompiler = trial.Vocabulary = lambda *_, **__: None
trial.WARM_UP = ()
trial.main()
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, start_new_session=True)
    assert ended.returncode == -signal.SIGKILL
