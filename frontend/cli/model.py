"""Which model a command means."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rootlace.cli.common import fail
from rootlace.runtime.model.checkpoint.config import check_config
from rootlace.runtime.model.checkpoint.source import ModelSource, model_source, servable_source
from rootlace.runtime.model.hub.local import local_model
from rootlace.wire.errors import RootlaceError


def described_model(given: str) -> str:
    """The model `given`, a folder or a GGUF file; ends the command if it is none."""
    return _checked(given, model_source, partial(local_model, weights=False))


def served_model(given: str | None, allow_pickle: bool = False) -> str:
    """As `described_model`, None: the embedded demo model; ends the command too if it cannot be
    served."""
    if given is not None:
        source_of = partial(servable_source, allow_pickle=allow_pickle)
        return _checked(given, source_of, partial(local_model, allow_pickle=allow_pickle))
    from rootlace.runtime.assets import demo_model

    try:
        return str(demo_model())
    except FileNotFoundError as error:
        fail(str(error))


def _checked(
    given: str, source_of: Callable[[str | Path], ModelSource], local: Callable[[str], str]
) -> str:
    try:
        source = source_of(local(given))
        check_config(source)
        return str(source.path.absolute())
    except RootlaceError as error:
        fail(str(error))
