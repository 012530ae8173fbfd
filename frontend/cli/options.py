"""Options: types, options of several commands, help, and options of a configuration. `rootlace
serve` also takes its options from a YAML file; the command line overrides them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from math import isnan
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import click

from rootlace.cli.common import check_runtime, fail
from rootlace.runtime.config import RuntimeConfig, Setting, settings

Command = TypeVar("Command", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)


class IntRange(click.IntRange):
    name = "integer"


class FloatRange(click.FloatRange):
    """Range of floats without NaN, which is neither below nor above a bound."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


class Size(click.ParamType[int]):
    """Number of bytes, written such as "512M", "4GiB" or "1000000"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
        if size < 1:
            self.fail(f"{value!r} is not a size; write it like 512M or 4G", param, ctx)
        return size


POSITIVE = IntRange(1)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def combined(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combine several options into one decorator, in their order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


server_options = combined(
    click.option("--url", default="http://127.0.0.1:30000", help="The running server."),
    click.option(
        "--api-key", envvar="ROOTLACE_API_KEY", show_envvar=True, help="The server's key."
    ),
)

backend_options = combined(
    click.option(
        "--model",
        show_default="demo model",
        help="Model folder to start a runtime with; with --url the name of a model there.",
    ),
    click.option("--url", help="Use a running server: http://, tcp:// or ipc://."),
    click.option("--api-key", help="The running server's key."),
)
"""Options for the arguments of `connected`."""


# Help ---------------------------------------------------------------------------------------------


class Group(click.Group):
    """Group of commands in definition order, each with the whole first sentence of its help."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(limit=1000)) for name, one in self.commands.items()]
            )


class Sections(click.Command):
    """Command whose help has a section for each part of the configuration."""

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


# Config file --------------------------------------------------------------------------------------


MODELS = "models"
"""Key of several models by name, in the file (`model` is one) and in the context."""
FILE = "file"
"""Key of the file's path in the context."""


def read_options(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the file's options the command's defaults. Keys are option names, with or without the
    two dashes."""
    if path is None:
        return
    context.meta[FILE] = path
    check_runtime()
    from rootlace.evaluation.task import Document

    document = Document(path, "must hold options and their values, such as port: 30000")
    content = document.content
    models = content.pop(MODELS, None)
    if models is not None:
        if not isinstance(models, dict) or not all(isinstance(m, str) for m in models.values()):
            fail(f"{path}: {MODELS} must name several models, such as {{a: FOLDER, b: FOLDER}}")
        context.meta[MODELS] = [f"{name}={model}" for name, model in models.items()]
    known = {
        option.removeprefix("--"): parameter
        for parameter in context.command.params
        if not parameter.is_eager
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("--")
    }
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("_", "-")
        if name not in known:
            close = difflib.get_close_matches(name, [*known, MODELS], 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise document.wrong((str(key),), f"there is no option {key!r}{hint}")
        if known[name].name in defaults:
            raise document.wrong((str(key),), "given twice")
        if f"--{name}" in known[name].secondary_opts and value is not None:
            value = not click.BOOL.convert(str(value), known[name], context)
        # Hand over text, as the command line does: click's types crash on lists and cut fractions.
        if value is not None and known[name].multiple:
            if isinstance(value, dict):
                value = [f"{key}={one}" for key, one in value.items()]
            several = value if isinstance(value, list) else [value]
            defaults[known[name].name] = [str(one) for one in several]
        elif value is not None:
            defaults[known[name].name] = str(value)
    context.default_map = {**(context.default_map or {}), **defaults}


# Configuration ------------------------------------------------------------------------------------


def with_options(config: type, **defaults: Any) -> Callable[[Command], Command]:
    """Add the options of `config` to a command that takes `**options`. `defaults`: the command's
    defaults that differ from the configuration's."""
    shown = [each for each in settings(config) if each.option.help]
    return combined(*[_option(each, defaults.get(each.keyword, each.default)) for each in shown])


def chosen(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` given to the command for `config`, by keyword."""
    return {
        setting.keyword: not value if _turns_off(setting) else value
        for setting in settings(config)
        if (value := values.get(setting.keyword)) is not None
    }


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
    """Return the option's type for the command line."""
    kind = setting.type
    if NoneType in get_args(kind):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if setting.option.size:
        return Size()
    if get_origin(kind) is tuple:
        return str
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if get_origin(kind) is not Annotated:
        return kind
    kind, meta = get_args(kind)
    if meta.ge is None and meta.le is None:
        return kind
    return {int: IntRange, float: FloatRange}[kind](meta.ge, meta.le)
