"""Reports about weights that are being read."""

import io

import pytest

from rootlace.runtime.engine.process import loading_bar, loading_log


def test_a_bar_in_one_line() -> None:
    stream = io.StringIO()
    tell = loading_bar(stream)
    tell("embedding", 0.0)
    tell("layer 1 of 2", 0.5)
    tell("layer 2 of 2", 1.0)
    written = stream.getvalue()
    first, middle, last = written.split("\r")[1:]
    assert first.startswith("loading [" + "." * 30 + "]   0% embedding")
    assert middle.startswith("loading [" + "#" * 15 + "." * 15 + "]  50% layer 1 of 2")
    assert last.startswith("loading [" + "#" * 30 + "] 100% layer 2 of 2")
    assert written.count("\n") == 1 and written.endswith("\n")


def test_now_and_then_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = [0.0]
    tell = loading_log(lambda: now[0])
    for second, fraction in ((1.0, 0.1), (2.5, 0.2), (3.0, 0.3), (4.6, 0.4)):
        now[0] = second
        tell("layer", fraction)
    assert caplog.messages == ["loading weights: 20 % (layer)", "loading weights: 40 % (layer)"]
