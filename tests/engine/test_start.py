"""Reports of an engine process that cannot start."""

from types import SimpleNamespace

import msgspec
import pytest

from rootlace.kernels.native.library import NativeOutOfMemory
from rootlace.runtime.config import SchedulerConfig
from rootlace.runtime.engine import __main__ as process
from rootlace.wire.errors import UnsupportedModel


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NativeOutOfMemory("the native kernels got no memory"), "internal", "got no memory"),
        (UnsupportedModel("no such folder"), UnsupportedModel.code, "no such folder"),
    ],
)
def test_an_error_is_told_and_not_died_of(
    error: Exception,
    code: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = SimpleNamespace(engine=SimpleNamespace(logs=None), socket_folder="", replicas=1)

    def serve(_: object) -> None:
        raise error

    for where, name, stub in (
        (process.processes, "set_up_logs", lambda *_: None),
        (process.signal, "signal", lambda *_: None),
        (process.processes, "read_config", lambda *_: config),
        (process.processes, "call_when_parent_ends", lambda *_: None),
        (process, "serve", serve),
    ):
        monkeypatch.setattr(where, name, stub)
    assert process.main() == 1
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["error"] == code and said in told["message"]


@pytest.mark.parametrize(
    ("device", "kernels", "asked", "step_seconds", "speculation_tokens"),
    [
        ("cpu", "native", {}, 0.25, 1 << 18),
        ("cpu", "reference", {}, 0.25, None),
        ("cuda", "triton", {}, None, None),
        ("cpu", "native", {"step_seconds": 0.0, "speculation_tokens": 0}, 0.0, 0),
        ("cuda", "triton", {"step_seconds": 2.0, "speculation_tokens": 3}, 2.0, 3),
    ],
)
def test_steps_are_bounded_and_drafted_where_nothing_else_was_asked_for(
    device: str,
    kernels: str,
    asked: dict[str, float],
    step_seconds: float | None,
    speculation_tokens: int | None,
) -> None:
    found = process.schedule_of(SchedulerConfig(**asked), device, kernels)
    assert (found.step_seconds, found.speculation_tokens) == (step_seconds, speculation_tokens)
