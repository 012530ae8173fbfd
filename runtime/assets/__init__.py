"""Data that comes with the package."""

from __future__ import annotations

from pathlib import Path


def page_folder() -> Path:
    """The files of the page that a server shows in a browser."""
    return Path(__file__).resolve().parent / "page"


def demo_model() -> Path:
    """The folder of the embedded demo model (Hugging Face layout).

    Raises FileNotFoundError when this installation does not have it.
    """
    folder = Path(__file__).resolve().parent / "demo"
    missing = [
        name
        for name in ("config.json", "tokenizer.json", "model.safetensors")
        if not (folder / name).is_file()
    ]
    if missing:
        raise FileNotFoundError(
            f"the embedded demo model is not in {folder} (missing {', '.join(missing)}); name a "
            "model folder, or make the demo model with: python -m examples.demo_model.train"
        )
    return folder
