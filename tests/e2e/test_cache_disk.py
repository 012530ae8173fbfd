"""Blocks on disk when a server ends or its engine is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

import rootlace as rl

PROMPTS = [f"Number {number}. " + "The same again, and again. " * 40 for number in range(3)]


def reports(disk: Path, most_blocks: int) -> list[dict[str, Any]]:
    """Return a server's report of each prompt. Its pool holds little more than one prompt."""

    @rl.function
    def asked(s: Any, prompt: str) -> None:
        s += prompt
        s += rl.gen("reply", max_tokens=2, temperature=0, return_cache_report=True)

    with rl.Runtime(num_blocks=most_blocks, cache_disk=str(disk), threads=1) as runtime:
        states = [asked.run(prompt, backend=runtime) for prompt in PROMPTS]
        return [state.get_meta_info("reply")["cache_report"] for state in states]


@pytest.mark.slow
def test_the_next_start_finds_what_was_cached(tmp_path: Path) -> None:
    cold = reports(tmp_path, 24)
    assert all(one["from_disk"] + one["on_disk"] == 0 for one in cold)
    warm = reports(tmp_path, 24)
    for one in warm:  # the demo model may compute faster than this disk reads
        found = one["matched"] + one["on_disk"]
        assert one["limit"] // 16 * 16 <= found <= one["limit"]
        assert one["on_disk"] == 0 or one["from_disk"] == 0


@pytest.mark.slow
def test_host_memory_gives_shared_prefixes_to_the_engine_that_follows_a_killed_one() -> None:
    @rl.function
    def asked(s: Any, prompt: str) -> None:
        s += prompt
        s += rl.gen("reply", max_tokens=2, temperature=0, return_cache_report=True)

    with rl.Runtime(cache_host_gb=0.1, threads=1) as runtime:

        def ask(end: str) -> tuple[str, dict[str, Any]]:
            state = asked.run(PROMPTS[0] + end, backend=runtime)
            return state["reply"], state.get_meta_info("reply")["cache_report"]

        ask("First")
        reply, _ = ask("Second")
        assert runtime.get_server_info()["host_blocks"] > 0
        (engine,) = psutil.Process(runtime.pid).children()
        engine.kill()
        again, report = ask("Second")
        shared = (report["limit"] - 8) // 16 * 16
        assert again == reply and report["matched"] >= shared > 100, report
        assert report["from_disk"] == report["matched"]
