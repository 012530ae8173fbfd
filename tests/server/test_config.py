"""A received configuration: its values are within their bounds, or the error names them."""

import msgspec
import pytest

from rootlace.runtime.config import EngineConfig


@pytest.mark.parametrize(
    ("part", "option", "wrong"),
    [
        ("cache", "block_size", 0),
        ("cache", "num_blocks", -3),
        ("scheduler", "max_running", 0),
        ("scheduler", "max_step_tokens", 0),
        ("scheduler", "max_waiting", -1),
        ("executor", "threads", 0),
        ("executor", "kv_memory_bytes", -5),
        ("executor", "kv_dtype", "fp8"),
        ("executor", "kernels", "fast"),
        ("executor", "cuda_graphs", "no"),
    ],
)
def test_values_out_of_bounds_are_named(part: str, option: str, wrong: object) -> None:
    sent = msgspec.json.encode({part: {option: wrong}})
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{part}\.{option}"):
        msgspec.json.decode(sent, type=EngineConfig)


def test_what_is_sent_is_what_is_read() -> None:
    config = EngineConfig(overlap=True)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
