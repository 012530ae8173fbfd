"""Commands `rootlace serve` (gateway and engine) and `rootlace keys` (API keys)."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rootlace.cli.common import check_runtime, draft_model, fail, served_model
from rootlace.cli.options import (
    MODELS,
    PATH,
    Group,
    IntRange,
    Sections,
    chosen,
    read_options,
    with_options,
)
from rootlace.runtime.config import RuntimeConfig, runtime_config

if TYPE_CHECKING:
    from rootlace.runtime.model.checkpoint.source import ModelSource
    from rootlace.runtime.server.app import Listening
    from rootlace.runtime.server.auth import KeyEntry

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TCP = re.compile(r"tcp://(?P<host>[^*]+):(?P<port>\d+)")


@click.command(cls=Sections)
@click.argument(
    "model",
    nargs=-1,
    help="Folder of the model, GGUF file, name that `rootlace models` lists, or name on the "
    "Hugging Face hub; of several models, NAME=MODEL each.  [default: (demo model)]",
)
@click.option("--model", "model_option", help="The same, as an option.")
@click.option(
    "--config",
    type=PATH,
    callback=read_options,
    expose_value=False,
    is_eager=True,
    help="YAML file of options by their names, and of the model or models.",
)
@click.option(
    "--api-key-file", type=PATH, help="Read the key from a file: arguments are seen by `ps`."
)
@with_options(RuntimeConfig, http_port=30000)
def serve(
    model: tuple[str, ...], model_option: str | None, api_key_file: Path | None, **options: Any
) -> None:
    """Serve a model to programs and to HTTP clients (OpenAI's, Anthropic's, Ollama's and sglang's
    interfaces).

    Of several models, a request chooses one by its name (`model`), or gets the first; each model
    has an engine process with these options.

    Prints its addresses once ready, and stops on SIGINT. SIGTERM refuses new work and finishes
    running requests; a second SIGTERM stops at once.
    """
    context = click.get_current_context()
    source = context.get_parameter_source("model_option")
    if model and source is click.core.ParameterSource.COMMANDLINE:
        fail("the model is given twice")
    if not model and model_option is None:
        model = context.meta.get(MODELS, ())
    settings = chosen(RuntimeConfig, options)
    if "num_blocks" in settings and "kv_memory_bytes" in settings:
        fail("give --kv-blocks or --kv-memory, not both")
    if api_key_file is not None:
        settings["api_key"] = _read_key(api_key_file)
    host, port = settings["host"], settings["http_port"]
    program_address = settings.pop("program_address", None) or _next_to(host, port)
    check_runtime()
    _check_port(host, port, "--port")
    match = _TCP.fullmatch(program_address)
    if match is not None:
        _check_port(match["host"].strip("[]"), int(match["port"]), "--program-address")
    configs: list[RuntimeConfig] = []
    sources: list[ModelSource] = []
    models = _named(model or [model_option])
    names = {name for name, _ in models}
    keys = [key for some in settings["ignore_config_keys"] for key in some.split(",")]
    settings = {**settings, "ignore_config_keys": keys}
    sampling = [one for some in settings["default_sampling"] for one in some.split(",")]
    for name, path in models:
        own = settings if name is None else {**settings, "served_name": name}
        # Settings that begin with a model's name are for this model alone.
        mine = [one for one in sampling if one.partition(":")[0] not in names - {name}]
        own = {**own, "default_sampling": [one.removeprefix(f"{name}:") for one in mine]}
        configs.append(_config(path, program_address, own, keys, sources))
    first = configs[0].gateway
    if host not in _LOOPBACK and not (first.api_key or first.keys_file):
        click.echo(f"warning: listening on {host} without an API key", err=True)
    if match is not None and match["host"].strip("[]") not in _LOOPBACK and not first.program_key:
        warning = "warning: programs' connections are not encrypted: see --program-key"
        click.echo(warning, err=True)
    _serve_until_signal(configs, sources)


def _config(
    model: str | None,
    program_address: str,
    settings: dict[str, Any],
    ignored: list[str],
    sources: list[ModelSource],
) -> RuntimeConfig:
    """Make a model's configuration. Raises RootlaceError for wrong options. Adds its files to the
    clearable list `sources`, since a caller's variable would keep the files in memory."""
    from rootlace.runtime.model.hub.local import known_name
    from rootlace.runtime.model.options import check_options

    pickles = settings.get("allow_pickle", False)
    source, read = served_model(model, pickles, ignored)  # downloads
    if settings.get("draft_model"):
        drafting = draft_model(settings["draft_model"], pickles, ignored)
        settings = {**settings, "draft_model": drafting}
    try:
        called = "" if model is None else known_name(model)
        stated = runtime_config(str(source.path.absolute()), program_address, settings, called)
        made = msgspec.convert(stated, RuntimeConfig)
        if read is not None:
            check_options(read, made.engine.executor, made.engine.cache)
    except msgspec.ValidationError as error:
        fail(str(error))
    sources.append(source)
    return made


def _named(values: Sequence[str | None]) -> list[tuple[str | None, str | None]]:
    """Return names and models; end the command unless several models have distinct names."""
    pairs: list[tuple[str | None, str | None]] = []
    for one in values:
        name, equals, model = (one or "").partition("=")
        named = bool(equals) and "/" not in name and not Path(one or "").exists()
        pairs.append((name, model) if named else (None, one))
    names = [name for name, _ in pairs]
    if len(pairs) > 1 and (None in names or len({*names}) < len(names) or "" in names):
        fail("of several models each needs a name of its own: rootlace serve a=MODEL b=MODEL")
    if "default" in names[1:]:
        fail("only the first model may be named default: whoever asks for that gets the first")
    if any(name and ":" in name for name in names):
        fail("a model's name holds no colon: what follows one is an adapter's")
    return pairs


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
    """Check now that the port is free, before the model is loaded."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        fail(f"cannot listen on {host}: {error.strerror or error}")
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            hint = f"; choose another one with {option}" if port else ""
            fail(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}")


def _serve_until_signal(models: Sequence[RuntimeConfig], sources: list[ModelSource]) -> None:
    """Serve, and keep `sources` until the server has read them, so that no file is read twice."""
    import asyncio
    from importlib import metadata

    def announce(listening: Listening) -> None:
        sources.clear()
        gateways = [model.gateway for model in models]
        names = [repr(one.served_name or Path(one.model).name) for one in gateways]
        version = metadata.version("rootlace")
        click.echo(f"rootlace {version} serves {', '.join(names)} (Ctrl-C stops it)")
        click.echo(f"  HTTP      {listening.http_address}")
        click.echo(f"  programs  {listening.program_address}")

    gc.disable()  # a tenth of a start: it makes many objects that stay, and garbage of few
    asyncio.run(_run(models, announce))


async def _run(models: Sequence[RuntimeConfig], ready: Callable[[Listening], None]) -> None:
    """Serve until a signal."""
    import asyncio

    from rootlace.runtime.server.app import serve_until

    loop = asyncio.get_running_loop()
    stop, drain = asyncio.Event(), asyncio.Event()

    def stop_now() -> None:
        if stop.is_set():
            os._exit(1)  # asked again: end without cleaning up. The engine ends with its input.
        stop.set()

    def on_term() -> None:
        stop_now() if drain.is_set() else drain.set()

    loop.add_signal_handler(signal.SIGINT, stop_now)
    loop.add_signal_handler(signal.SIGTERM, on_term)
    await serve_until(models, ready, stop, drain)


@click.group(cls=Group)
def keys() -> None:
    """Manage API keys of a server (`rootlace serve --keys FILE`), which follows changes at once."""


_name = click.argument("name", help="The key's name, in logs and metrics.")


_file = click.option(
    "--keys",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default="keys.json",
    envvar="ROOTLACE_KEYS",
    show_envvar=True,
    help="The file of keys.",
)


@keys.command()
@_name
@_file
@click.option("--requests-per-minute", type=IntRange(1), show_default="no limit")
@click.option("--tokens-per-minute", type=IntRange(1), show_default="no limit")
@click.option(
    "--namespace",
    type=click.Choice(["own", "shared"]),
    default="own",
    help="Whether its cached prefixes are its own.",
)
@click.option("--max-priority", type=int, show_default="no bound")
@click.option("--max-pins", type=int, show_default="no bound")
@click.option("--max-batches", type=int, show_default="no bound")
def add(name: str, file: Path, **quotas: Any) -> None:
    """Make a key and print it, only now, since the file does not hold the key."""
    check_runtime()
    from rootlace.runtime.server.auth import new_key, read_keys

    try:
        known = read_keys(str(file)) if file.exists() else ()
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    if any(entry.name == name for entry in known):
        fail(f"{file} has a key named {name!r} already")
    key, entry = new_key(name, **quotas)
    _write_keys(file, (*known, entry))
    click.echo(key)


@keys.command("list")
@_file
def list_(file: Path) -> None:
    """List the keys' names, quotas and namespaces."""
    check_runtime()
    from rootlace.runtime.server.auth import read_keys

    for entry in read_keys(str(file)):
        quotas = (
            (entry.requests_per_minute, "requests/min"),
            (entry.tokens_per_minute, "tokens/min"),
            (entry.max_priority, "max priority"),
            (entry.max_pins, "pins"),
            (entry.max_batches, "batches"),
        )
        shown = [f"{limit} {unit}" for limit, unit in quotas if limit is not None]
        click.echo(f"{entry.name}  {', '.join(shown) or 'no quota'}  namespace {entry.namespace}")


@keys.command()
@_name
@_file
def remove(name: str, file: Path) -> None:
    """Remove a key; the server refuses it at once."""
    check_runtime()
    from rootlace.runtime.server.auth import read_keys

    known = read_keys(str(file))
    if all(entry.name != name for entry in known):
        near = get_close_matches(name, [entry.name for entry in known], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        fail(f"{file} has no key named {name!r}{hint}")
    _write_keys(file, [entry for entry in known if entry.name != name])


def _write_keys(file: Path, entries: Sequence[KeyEntry]) -> None:
    from rootlace.runtime.server.auth import write_keys

    try:
        write_keys(str(file), entries)
    except OSError as error:
        fail(str(error))
