"""The whole runtime on the device: processes, sockets, a program."""

from pathlib import Path

import pytest
import torch

import rootlace as rl

pytest.importorskip("zmq", reason="the runtime's processes speak ZeroMQ")
pytest.importorskip("jinja2", reason="chat templates need Jinja2")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "int8", "int4"])
def test_a_program(
    demo_model: Path, device: torch.device, real: bool, kv_dtype: str, tmp_path: Path
) -> None:
    if not real and kv_dtype != "fp8_e4m3":
        pytest.skip("tests/e2e does this on the CPU, and once with a cache of few bits suffices")

    @rl.function
    def card(s, name):  # type: ignore[no-untyped-def]
        s += f"Name: {name}\nAge:"
        s += rl.gen("age", regex=r" [1-9][0-9]?", temperature=0)
        branches = s.fork(3)
        for number, branch in enumerate(branches):
            branch += f"\nNote {number}:"
            branch += rl.gen("note", max_tokens=12, temperature=0)
        s["notes"] = [branch["note"] for branch in branches]

    log = tmp_path / "log.txt"
    options = {"kv_memory_bytes": 1 << 28, "kv_dtype": kv_dtype, "device": str(device)}
    with rl.Runtime(model=str(demo_model), log_file=log, **options) as runtime:
        states = [card.run(name, backend=runtime) for name in ("Mara", "Jon", "Mara")]
    for state in states:
        assert 1 <= int(state["age"]) <= 99
        assert len(state["notes"]) == 3
    assert states[0]["age"] == states[2]["age"] and states[0]["notes"] == states[2]["notes"]
    assert "Traceback" not in log.read_text()
