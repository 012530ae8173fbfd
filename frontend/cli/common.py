"""Shared by commands: failing with one line, finding the model, asking a server, their options."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

import click

from rootlace.runtime.config import RuntimeConfig, Setting, settings
from rootlace.wire.errors import RootlaceError, ServerUnavailable

if TYPE_CHECKING:
    from rootlace.runtime.model.checkpoint.config import ModelConfig
    from rootlace.runtime.model.checkpoint.source import ModelSource

Command = TypeVar("Command", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(1)


def options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator, in their order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


class Group(click.Group):
    """Commands in the order of their definition, each with the whole first sentence of its help."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(limit=1000)) for name, one in self.commands.items()]
            )


# Failure ------------------------------------------------------------------------------------------
#
# How a command fails: one clear line on standard error and exit code 1.


INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""

_RUNTIME_MODULES = (
    *("aiohttp", "huggingface_hub", "interegular", "jsonschema", "jsonschema_rs", "llguidance"),
    *("numpy", "outlines_core", "tokenizers", "torch", "yaml"),
)


def tell(message: str) -> None:
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(message, err=True)


def fail(message: str) -> NoReturn:
    tell(message)
    raise click.exceptions.Exit(1)


def check_runtime() -> None:
    """End the command with a hint where `rootlace[runtime]` is not installed. Imports nothing."""
    missing = [name for name in _RUNTIME_MODULES if not _is_there(name)]
    if missing:
        fail(
            "this needs the runtime, which is not installed here; install it with: "
            f"pip install 'rootlace[runtime]' (missing: {', '.join(missing)})"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# Server -------------------------------------------------------------------------------------------


_TIMEOUT = 60.0


server_options = options(
    click.option("--url", default="http://127.0.0.1:30000", help="The running server."),
    click.option(
        "--api-key", envvar="ROOTLACE_API_KEY", show_envvar=True, help="The server's key."
    ),
)


def ask(url: str, path: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    """The server's answer; ends the command where there is none, or an error."""
    try:
        return answer_of(url, path, api_key, body)
    except ServerUnavailable as error:
        fail(str(error))


def answer_of(url: str, path: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    """As `ask`, but raises ServerUnavailable where the server may answer later."""
    import urllib.error
    import urllib.request

    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data=data)
    request.add_header("Content-Type", "application/json")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            answer = response.read()
            return json.loads(answer) if answer.startswith((b"{", b"[")) else answer
    except urllib.error.HTTPError as error:
        reason = f"{url}: {_message(error.read()) or error}"
        if error.code == ServerUnavailable.http_status:
            raise ServerUnavailable(reason) from None
        fail(reason)
    except (OSError, ValueError) as error:
        fail(f"there is no server at {url}: {getattr(error, 'reason', error)}")


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


# Model --------------------------------------------------------------------------------------------


def described_model(given: str) -> str:
    """The model `given`, a folder or a GGUF file; ends the command if it is none."""
    from rootlace.runtime.model.checkpoint.config import check_config
    from rootlace.runtime.model.checkpoint.source import model_source
    from rootlace.runtime.model.hub.local import local_model

    try:
        source = model_source(local_model(given, weights=False))
        check_config(source, ignored=None)
    except RootlaceError as error:
        fail(str(error))
    return str(source.path.absolute())


def draft_model(
    given: str,
    allow_pickle: bool = False,
    ignored: Collection[str] = (),
    *,
    weights: bool = True,
) -> str:
    """The draft model or head `given`; ends the command if it is none, or, with `weights`, if it
    cannot be served. A head is judged beside the model."""
    from rootlace.runtime.model.hub.local import local_model
    from rootlace.runtime.model.options import names_head

    try:
        path = local_model(given, weights=weights, allow_pickle=allow_pickle)
        if names_head(path):
            return str(Path(path).expanduser().absolute())
    except (RootlaceError, FileNotFoundError) as error:
        fail(str(error))
    if not weights:
        return described_model(given)
    return str(served_model(given, allow_pickle, ignored)[0].path.absolute())


def served_model(
    given: str | None, allow_pickle: bool = False, ignored: Collection[str] = ()
) -> tuple[ModelSource, ModelConfig | None]:
    """As `described_model`, None: the embedded demo model; ends the command too if it cannot be
    served. With what its files say, where that takes no import of torch."""
    from rootlace.runtime.assets import demo_model
    from rootlace.runtime.model.checkpoint.config import check_config
    from rootlace.runtime.model.checkpoint.source import servable_source
    from rootlace.runtime.model.hub.local import local_model

    try:
        if given is None:
            given = str(demo_model())
        source = servable_source(local_model(given, allow_pickle=allow_pickle), allow_pickle)
        config = check_config(source, ignored)
    except (RootlaceError, FileNotFoundError) as error:
        fail(str(error))
    return source, config


# Backend ------------------------------------------------------------------------------------------


backend_options = options(
    click.option(
        "--model", show_default="demo model", help="Model folder to start a runtime with."
    ),
    click.option("--url", help="Use a running server: http://, tcp:// or ipc://."),
    click.option("--api-key", help="The running server's key."),
)
"""The arguments of `connected`."""


@contextmanager
def connected(model: str | None, url: str | None, api_key: str | None) -> Iterator[Any]:
    """The backend at `url`, or a runtime started with `model` (default: the demo model).

    It is closed at the end of the block. Ends the command where there is none.
    """
    import rootlace as rl

    if model is not None and url is not None:
        fail("give --model or --url, not both")
    if url is not None:
        try:
            backend: Any = rl.RuntimeEndpoint(url, api_key=api_key or None)
        except RootlaceError as error:
            fail(str(error))
        with closing(backend):
            yield backend
        return
    source, _ = served_model(model)
    check_runtime()
    try:
        runtime: Any = rl.Runtime(model_path=source.path.absolute())
    except RootlaceError as error:
        fail(str(error))
    with runtime:
        yield runtime


# Config file --------------------------------------------------------------------------------------
#
# The options of `rootlace serve` from a YAML file; what the command line says counts more.


MODELS = "models"
"""In the file, several models by name; `model` is one. In the context, what stands there."""


def read_options(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the file's options the defaults of the command. Its keys are the names of options, with
    or without the two dashes before."""
    if path is None:
        return
    given = _read_file(path)
    models = given.pop(MODELS, None)
    if models is not None:
        if not isinstance(models, dict) or not all(isinstance(m, str) for m in models.values()):
            fail(f"{path}: {MODELS} must name several models, such as {{a: FOLDER, b: FOLDER}}")
        context.meta[MODELS] = [f"{name}={model}" for name, model in models.items()]
    known = {
        option.removeprefix("--"): parameter
        for parameter in context.command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    }
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).removeprefix("--").replace("_", "-")
        if name not in known:
            close = difflib.get_close_matches(name, [*known, MODELS], 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            fail(f"{path}: there is no option {key!r}{hint}")
        if value is not None:
            if known[name].multiple and isinstance(value, dict):
                value = [f"{key}={one}" for key, one in value.items()]
            one_of_many = known[name].multiple and not isinstance(value, list)
            defaults[known[name].name] = [value] if one_of_many else value
    context.default_map = {**(context.default_map or {}), **defaults}


def _read_file(path: Path) -> dict[Any, Any]:
    check_runtime()
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"{path} cannot be read: {' '.join(str(error).split())}")
    if not isinstance(found, dict):
        fail(f"{path} must hold options and their values, such as port: 30000")
    return found


# Options ------------------------------------------------------------------------------------------


_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def with_options(config: type, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command that takes `**options` the options of `config`.

    `defaults`: where the command's differ from the configuration's.
    """
    found = [each for each in settings(config) if each.option.help]
    return options(*[_option(each, defaults.get(each.keyword, each.default)) for each in found])


class Sections(click.Command):
    """Shows the options of each part of the configuration under a heading of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        parts = {one.keyword: one.path[-2].capitalize() for one in settings(RuntimeConfig)}
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections.setdefault(parts.get(parameter.name, "Options"), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


def chosen(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """By keyword, the values for `config` that the command was `given`."""
    return {
        setting.keyword: _value(setting, given[setting.keyword])
        for setting in settings(config)
        if given.get(setting.keyword) is not None
    }


def parse_size(text: str) -> int:
    """Bytes of a size such as "512M", "4GiB" or "1000000"; ends the command if it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        fail(f"{text!r} is not a size; write it like 512M or 4G")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _turns_off(setting: Setting) -> bool:
    return setting.option.flag.startswith("--no-")


def _option(setting: Setting, default: Any) -> Callable[[Any], Any]:
    option = setting.option
    kind = _kind(setting)
    return click.option(
        option.flag or f"--{setting.keyword.replace('_', '-')}",
        setting.keyword,
        type=kind,
        default=False if _turns_off(setting) else default,
        is_flag=kind is bool,
        multiple=isinstance(default, tuple),
        show_default=option.shown or default != "",
        help=option.help,
    )


def _kind(setting: Setting) -> Any:
    """The type that the command line reads."""
    kind = setting.type
    if NoneType in get_args(kind):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if setting.option.size or get_origin(kind) is tuple:
        return str
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if get_origin(kind) is not Annotated:
        return kind
    kind, meta = get_args(kind)
    if meta.ge is meta.le is None:
        return kind
    return {int: click.IntRange, float: click.FloatRange}[kind](meta.ge, meta.le)


def _value(setting: Setting, given: Any) -> Any:
    if setting.option.size:
        return parse_size(given)
    return not given if _turns_off(setting) else given
