"""`rootlace serve`: gateway and engine in the foreground, answering HTTP and programs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.failure import check_backend, check_runtime, fail
from rootlace.cli.model import model_folder
from rootlace.wire.errors import RootlaceError

if TYPE_CHECKING:
    from rootlace.runtime.config import EngineConfig, GatewayConfig
    from rootlace.runtime.gateway.app import Listening

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TCP = re.compile(r"tcp://(?P<host>[^*]+):(?P<port>\d+)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class KVDtype(StrEnum):
    auto = "auto"
    fp8_e4m3 = "fp8_e4m3"


class Kernels(StrEnum):
    auto = "auto"
    native = "native"
    reference = "reference"


class PolicyName(StrEnum):
    lpm = "lpm"
    fcfs = "fcfs"
    dfs = "dfs"


class ConstraintBackend(StrEnum):
    auto = "auto"
    automaton = "automaton"
    llguidance = "llguidance"
    outlines_core = "outlines_core"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder of the model (Hugging Face layout).", show_default="demo model"
        ),
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help="The same, as an option.")
    ] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 takes a free one.")] = (
        30000
    ),
    program_address: Annotated[
        str | None,
        typer.Option(
            help="Where programs connect, tcp:// or ipc://.", show_default="tcp, port + 1"
        ),
    ] = None,
    api_key: Annotated[str, typer.Option(help="Refuse clients that do not have this key.")] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="Read the key from a file: arguments are seen by `ps`.")
    ] = None,
    served_name: Annotated[
        str, typer.Option(help="Name of the model for clients.", show_default="the folder's")
    ] = "",
    stream_interval: Annotated[
        float,
        typer.Option(min=0, help="Seconds between pieces of a stream, where tokens come faster."),
    ] = 0.02,
    dtype: Annotated[Dtype, typer.Option(help="Weights and KV cache; auto is as stored.")] = (
        Dtype.auto
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the engine.")] = None,
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Shorten the context window.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Token slots per KV block.")] = 16,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks in the KV pool.", show_default="by memory")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory of the KV pool, such as 512M or 4G.")
    ] = None,
    kv_dtype: Annotated[
        KVDtype, typer.Option(help="KV cache; auto is that of the weights, fp8_e4m3 half of it.")
    ] = KVDtype.auto,
    kernels: Annotated[
        Kernels,
        typer.Option(
            help="On a CPU: native ones are compiled when first needed; auto is that if it can be."
        ),
    ] = Kernels.auto,
    max_step_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens computed in one step at most.")
    ] = 2048,
    max_running: Annotated[int, typer.Option(min=1, help="Requests in one step at most.")] = 256,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests in the queue; beyond it clients get 429.")
    ] = 16384,
    policy: Annotated[PolicyName, typer.Option(help="Order of waiting requests.")] = PolicyName.lpm,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not reuse any prefix.")] = False,
    constraint_backend: Annotated[
        ConstraintBackend,
        typer.Option(help="What runs constraints; auto is our automaton where it fits."),
    ] = ConstraintBackend.auto,
    no_jump_forward: Annotated[
        bool, typer.Option("--no-jump-forward", help="Sample text that a constraint forces, too.")
    ] = False,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="Plan a step while the one before it runs.",
            show_default="on a GPU",
        ),
    ] = None,
    no_cuda_graphs: Annotated[
        bool, typer.Option("--no-cuda-graphs", help="Launch decode steps kernel by kernel.")
    ] = False,
    check_invariants: Annotated[
        bool, typer.Option("--check-invariants", help="Check the tree after every step (slow).")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="What to log.")] = LogLevel.warning,
) -> None:
    """Serve a model to HTTP clients (OpenAI's and sglang's interfaces) and to programs.

    Prints its addresses when it is ready to answer, and stops on SIGINT or SIGTERM.
    """
    if model is not None and model_option is not None:
        fail("the model is given twice")
    if kv_blocks is not None and kv_memory is not None:
        fail("give --kv-blocks or --kv-memory, not both")
    if api_key_file is not None:
        api_key = _read_key(api_key_file)
    folder = model_folder(model or model_option)
    check_runtime()
    check_backend(constraint_backend.value)
    from rootlace.runtime.config import (
        CacheConfig,
        ConstraintConfig,
        EngineConfig,
        ExecutorConfig,
        GatewayConfig,
        SchedulerConfig,
    )

    gateway = GatewayConfig(
        model=folder,
        program_address=program_address or _next_to(host, port),
        served_name=served_name,
        host=host,
        http_port=port,
        api_key=api_key,
        stream_interval=stream_interval,
    )
    engine = EngineConfig(
        executor=ExecutorConfig(
            model=folder,
            dtype=dtype.value,
            device=device,
            threads=threads,
            context_length=context_length,
            kv_memory_bytes=None if kv_memory is None else parse_size(kv_memory),
            kv_dtype=kv_dtype.value,
            kernels=kernels.value,
            cuda_graphs=not no_cuda_graphs,
        ),
        cache=CacheConfig(block_size=block_size, num_blocks=kv_blocks, enabled=not no_cache),
        scheduler=SchedulerConfig(
            policy=policy.value,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
            check_invariants=check_invariants,
        ),
        constraints=ConstraintConfig(
            backend=constraint_backend.value, jump_forward=not no_jump_forward
        ),
        overlap=overlap,
    )
    _check_port(host, port, "--port")
    found = _TCP.fullmatch(gateway.program_address)
    if found is not None:
        _check_port(found["host"].strip("[]"), int(found["port"]), "--program-address")
    if host not in _LOOPBACK and not api_key:
        typer.echo(f"warning: listening on {host} without an API key", err=True)
    _serve_until_signal(gateway, engine, log_level.value)


def parse_size(text: str) -> int:
    """Bytes of a size such as "512M", "4GiB" or "1000000"; ends the command if it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        fail(f"{text!r} is not a size; write it like 512M or 4G")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _next_to(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    if port == 65535:
        fail("there is no port after 65535 for programs: give --program-address")
    return f"tcp://{shown}:{port + 1 if port else 0}"


def _read_key(path: Path) -> str:
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"the API key cannot be read: {error}")
    if not key:
        fail(f"{path} holds no API key")
    return key


def _check_port(host: str, port: int, option: str) -> None:
    """Say at once what would otherwise be found out after the model is loaded."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        fail(f"cannot listen on {host}: {error.strerror or error}")
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            hint = f"; choose another one with {option}" if port else ""
            fail(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}")


def _serve_until_signal(gateway: GatewayConfig, engine: EngineConfig, log_level: str) -> None:
    from rootlace.runtime.gateway.app import serve as serve_gateway

    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        asyncio.run(_run(serve_gateway, gateway, engine))
    except RootlaceError as error:
        fail(str(error))


async def _run(serve_gateway: Any, gateway: GatewayConfig, engine: EngineConfig) -> None:
    """Serve until a signal. One that comes while the model is loading ends the loading."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # asked twice: at once. The engine ends with its standard input.
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    is_ready = False

    def ready(listening: Listening) -> None:
        nonlocal is_ready
        is_ready = True
        _announce(listening, gateway)

    serving = asyncio.create_task(serve_gateway(gateway, engine, ready, stop))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not is_ready and not serving.done():
        serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _announce(listening: Listening, gateway: GatewayConfig) -> None:
    name = gateway.served_name or Path(gateway.model).name
    typer.echo(f"rootlace {metadata.version('rootlace')} serves {name!r} (Ctrl-C stops it)")
    typer.echo(f"  HTTP      {listening.http_address}")
    typer.echo(f"  programs  {listening.program_address}")
