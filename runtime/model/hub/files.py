"""The name of a model on the Hugging Face hub, and which files of a repository the model needs."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from rootlace.runtime.model.checkpoint.source import (
    PICKLED,
    POOLING_FILES,
    TOKENIZERS,
    weight_names,
)
from rootlace.wire.errors import UnsupportedModel

# Name ---------------------------------------------------------------------------------------------
#
# The name of a model on the Hugging Face hub, as users write it.


_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(@(?P<revision>[^\s:@]+))?(:(?P<variant>[\w.-]+))?")


@dataclass(frozen=True)
class HubName:
    """`owner/name`, `owner/name@revision`, `owner/name:Q4_K_M`: a repository, a branch, tag or
    commit of it (None: its main branch), and which of its GGUF files, by the name of a format or
    of the file (None: its safetensors, where it has any)."""

    repo: str
    revision: str | None = None
    variant: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a name; None where `text` cannot be one."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(**found.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.variant}" if self.variant else "")


# Files --------------------------------------------------------------------------------------------


CONFIG = "config.json"
ABOUT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    *POOLING_FILES,
)
"""Further files that are read where a repository has them."""

USUAL = "Q4_K_M"
"""The GGUF format that is taken where none is named and several are there."""

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_FORMAT = re.compile(r"(?:^|[-_.])((?:IQ|Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)


def tokenizer_file(files: Collection[str]) -> str:
    """The file of the tokenizer; the usual one where there is none."""
    return next((name for name in TOKENIZERS if name in files), TOKENIZERS[0])


def gguf_files(name: HubName, files: Collection[str]) -> list[str]:
    """The files of the GGUF model that `name` means, the first of several first; empty where it
    means none. Raises `UnsupportedModel` where it is not clear which, or parts are not there."""
    models = gguf_models(files)
    if name.variant is None:
        if CONFIG in files or not models:
            return []
        found = [stem for stem in models if format_of(stem) == USUAL] or list(models)
    else:
        found = _matching(name.variant.lower().removesuffix(".gguf"), models)
    if len(found) == 1:
        return _whole(name, models[found[0]])
    formats = sorted({format_of(stem) or stem for stem in models})
    has = f"there are {', '.join(formats)}" if models else "there is no GGUF file"
    which = "say which" if name.variant is None else f"{len(found) or 'no'} files match"
    raise UnsupportedModel(f"{name}: {which}, as in {name.repo}:{USUAL}; {has}")


def gguf_models(files: Collection[str]) -> dict[str, list[str]]:
    """Map each model, by its name without part number and ending, to its files; no projectors."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and "mmproj" not in file:
            found.setdefault(_SPLIT.sub("", file.removesuffix(".gguf")), []).append(file)
    return found


def format_of(stem: str) -> str | None:
    """The format that the name of a GGUF file ends with."""
    found = _FORMAT.search(stem)
    return found[1].upper() if found else None


def weight_files(name: HubName, files: Collection[str], allow_pickle: bool = False) -> str:
    """The file of the weights, or the index of several. Raises `UnsupportedModel` where there is
    none that is read."""
    for file in weight_names(allow_pickle):
        if file in files:
            return file
    pickled = next((file for file in sorted(files) if file.endswith((".bin", ".pth"))), None)
    why = "the repository has no weights"
    if pickled is not None:
        allowed = "--allow-pickle (allow_pickle=True) reads the tensors, and runs no code. "
        why = (
            f"its weights are in {pickled}: such files can run code when they are read. "
            f"{allowed if any(file in files for file in PICKLED) else ''}To convert them, get it "
            f"with `hf download {name.repo} --local-dir FOLDER` and serve FOLDER, which says how"
        )
    raise UnsupportedModel(f"{name}: {why}")


def _matching(wanted: str, stems: Collection[str]) -> list[str]:
    """Match the file's name, else its format, else the end of its name, as `UD-Q4_K_XL`."""
    last = {stem: stem.rpartition("/")[2].lower() for stem in stems}
    for found in (
        [stem for stem in stems if last[stem] == wanted],
        [stem for stem in stems if str(format_of(stem)).lower() == wanted],
        [stem for stem in stems if re.search(rf"[-_.]{re.escape(wanted)}$", last[stem])],
    ):
        if found:
            return found
    return []


def _whole(name: HubName, parts: list[str]) -> list[str]:
    numbers = [_SPLIT.search(part.removesuffix(".gguf")) for part in parts]
    count = max((int(found[2]) for found in numbers if found), default=1)
    there = {int(found[1]) if found else 1 for found in numbers}
    missing = next((number for number in range(1, count + 1) if number not in there), None)
    if missing is not None:
        raise UnsupportedModel(f"{name}: part {missing} of {count} is not there")
    return parts
