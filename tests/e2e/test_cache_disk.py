"""A server with a disk below its cache is told to end, and another one starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rootlace as rl

PROMPTS = [f"Number {number}. " + "The same again, and again. " * 40 for number in range(3)]


def reports(disk: Path, most_blocks: int) -> list[dict[str, Any]]:
    """What a server says of each prompt. Its pool has room for little more than one."""

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
