"""Configuration: one frozen dataclass per part, passed in; nothing reads the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
"""Checked where a configuration is received, so that who sent it is told which of its values."""

Policy = Literal["lpm", "fcfs", "dfs"]


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool and its tree. `num_blocks=None` lets the executor size it from free memory."""

    block_size: Positive = 16
    num_blocks: Positive | None = None
    enabled: bool = True
    """False: nothing is matched and nothing kept (for measurements)."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Iteration-level scheduling.

    `max_step_tokens` bounds the tokens computed in one step (decode rows count one each),
    `max_running` the rows, `max_waiting` the queue (beyond it a request is refused as overloaded).
    A waiting request is overtaken by at most `max_overtaken` later ones, or by as many as have
    `max_delay` times the work that was waiting before it when it came (docs/simulation.md).
    """

    policy: Policy = "lpm"
    max_step_tokens: Positive = 2048
    max_running: Positive = 256
    max_waiting: Annotated[int, Meta(ge=0)] = 16384
    max_overtaken: int = 16
    max_delay: Annotated[float, Meta(ge=0)] = 0.25
    check_invariants: bool = False


@dataclass(frozen=True)
class ExecutorConfig:
    """Model execution. `dtype="auto"` takes the checkpoint's; `context_length` may only shorten."""

    model: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    threads: Positive | None = None
    context_length: int | None = None
    kv_memory_bytes: Positive | None = None
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """"auto": that of the model. "fp8_e4m3": a byte per element, scaled per layer and head."""
    kernels: Literal["auto", "native", "reference"] = "auto"
    """"native": compiled for this CPU when first needed; "auto": native where that is possible."""
    cuda_graphs: bool = True


@dataclass(frozen=True)
class ConstraintConfig:
    """Constraints: which machine runs them, and the bounds of one.

    `backend="auto"` takes our automaton for what is regular and of modest size, and llguidance for
    the rest; "outlines_core" is for compatibility (regular constraints only). Compilation of one
    constraint ends with `InvalidConstraint` after `compile_seconds` or `compile_memory_bytes`.
    `max_states` and `max_table_bytes` bound one automaton; beyond them llguidance takes over.
    At most `cache_size` grammars of about `cache_bytes` are kept for later requests.
    `max_retreats` bounds how often one request may be taken back by a check. A GPU steps automata
    of at most `max_device_states` by itself if their tables take at most `max_device_bytes`.
    """

    backend: Literal["auto", "automaton", "llguidance", "outlines_core"] = "auto"
    jump_forward: bool = True
    cache_size: int = 256
    cache_bytes: int = 512 << 20
    max_source_bytes: int = 2**20
    compile_seconds: float = 10.0
    compile_memory_bytes: int = 1 << 30
    compile_threads: int = 1
    mask_threads: int = 1
    max_states: int = 16384
    max_table_bytes: int = 64 << 20
    max_retreats: int = 64
    max_device_states: int = 4096
    max_device_bytes: int = 16 << 20


@dataclass(frozen=True)
class EngineConfig:
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    constraints: ConstraintConfig = field(default_factory=ConstraintConfig)
    overlap: bool | None = None
    """Plan a step while the one before it runs. None: where the executor runs beside the host."""


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway. `http_port=None`: no HTTP. Programs connect to `program_address` (ZeroMQ)."""

    model: str
    program_address: str
    served_name: str = ""
    host: str = "127.0.0.1"
    http_port: int | None = None
    api_key: str = ""
    max_connections: int = 1024
    max_branches: int = 65536
    max_message_bytes: int = 64 * 2**20
    stream_interval: Annotated[float, Meta(ge=0)] = 0.02
    """Seconds between two pieces of a stream, where tokens come faster (0: each by itself). The
    first piece never waits."""
    client_timeout: float = 30.0
    """Seconds of silence after which a program's connection counts as dead (it pings)."""
