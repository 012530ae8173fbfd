"""Which model a command means."""

from __future__ import annotations

from pathlib import Path

from rootlace.cli.failure import fail


def model_folder(given: str | None) -> str:
    """The folder `given`, or the embedded demo model's; ends the command if there is none."""
    if given is None:
        from rootlace.runtime.assets import demo_model

        try:
            return str(demo_model())
        except FileNotFoundError as error:
            fail(str(error))
    folder = Path(given).expanduser()
    if not folder.is_dir():
        fail(f"{given} is not a folder (models are read from local folders, never downloaded)")
    if not (folder / "config.json").is_file():
        fail(f"{given} is not a model folder: it has no config.json")
    return str(folder.resolve())
