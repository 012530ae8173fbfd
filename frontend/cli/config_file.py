"""The options of `rootlace serve` from a YAML file; what the command line says counts more."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import typer

from rootlace.cli.failure import check_runtime, fail

MODELS = "models"
"""In the file, several models by name; `model` is one. In the context, what stands there."""


def read_options(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's options the defaults of the command. Its keys are the names of options, with
    or without the two dashes before."""
    if path is None:
        return None
    given = _read(path)
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
            defaults[str(known[name].name)] = [value] if one_of_many else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _read(path: Path) -> dict[Any, Any]:
    check_runtime()
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"{path} cannot be read: {' '.join(str(error).split())}")
    if not isinstance(found, dict):
        fail(f"{path} must hold options and their values, such as port: 30000")
    return found
