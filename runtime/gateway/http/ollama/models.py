"""What is served, as Ollama's clients ask: tags, show, ps and version; and embeddings."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NotRequired, TypedDict

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.branches.vectors import find_vectors
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.chat.chats import Chats
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.handling import handling_without_pin
from rootlace.runtime.gateway.http.info import Version
from rootlace.runtime.gateway.http.ollama.body import NAMES, EmbedBody, ShowBody
from rootlace.runtime.gateway.http.prompts import Prompt
from rootlace.runtime.gateway.http.replies import adapter_of, check_model, json_response
from rootlace.runtime.gateway.http.reply_headers import note_usage
from rootlace.runtime.gateway.http.source import source
from rootlace.runtime.gateway.keys.account import admitted, namespace_of
from rootlace.runtime.model.checkpoint.source import About, model_source
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import Usage

NEVER = "9999-12-31T23:59:59+00:00"
"""When a model is unloaded that stays."""


def check_name(gateway: Gateway, asked: str) -> str:
    """The served model's name. Ollama's clients add a tag. Raises ModelNotFound for another one."""
    return check_model(gateway, asked.removesuffix(":latest"))


class Details(TypedDict):
    """What the model's files say: the architecture as they name it, how many numbers its weights
    are, and the type of most of these. Texts are empty where nobody can tell."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Entry(TypedDict):
    """A model as Ollama lists it: the bytes of its files, and 64 hexadecimal digits of their names,
    sizes and times. Where it runs, also its context, when it is unloaded, and the bytes on a GPU:
    all or none."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: NotRequired[str]
    size_vram: NotRequired[int]
    context_length: NotRequired[int]


class Entries(TypedDict):
    """What is served."""

    models: list[Entry]


class Shown(TypedDict):
    """A model."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int | float | bool]
    capabilities: list[str]
    modified_at: str


class Embedded(TypedDict):
    """Vectors of length 1."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class Models:
    """The handlers."""

    def __init__(self, gateway: Gateway, chats: Chats) -> None:
        self._gateway = gateway
        self._chats = chats
        self._started = datetime.now(UTC).isoformat()

    async def version(self, request: web.Request) -> web.Response:
        return json_response(Version(metadata.version("rootlace")))

    async def tags(self, request: web.Request) -> web.Response:
        return json_response(Entries(models=[await self._entry()]))

    async def running(self, request: web.Request) -> web.Response:
        return json_response(Entries(models=[running_of(self._gateway, await self._entry())]))

    async def show(self, request: web.Request) -> web.Response:
        body = await read_body(request, ShowBody)
        check_name(self._gateway, body.model or body.name or "")
        info = self._gateway.model_info
        template = self._gateway.chat.source
        able = ["completion", "embedding"]
        shows = self._chats.tool_prompt(with_tools=True)
        if shows.lists or self._gateway.config.tools == "auto":
            able.append("tools")
        if not (shows.lists or "tools" not in able):
            able.append("tools-in-own-words")
        if self._chats.format.always:
            able.append("thinking")
        about = await asyncio.to_thread(_about, info.path, _files_at(Path(info.path))[1])
        architecture = about.architecture or "rootlace"
        shown: Shown = {
            "modelfile": "",
            "parameters": "\n".join(
                f"{NAMES.get(name, name):<30} {value:g}" for name, value in info.sampling.items()
            ),
            "template": template or "",
            "details": _details(about),
            "model_info": {
                "general.architecture": architecture,
                "general.basename": info.name,
                **({} if about.numbers is None else {"general.parameter_count": about.numbers}),
                **about.stated,
                f"{architecture}.context_length": info.context_length,
                f"{architecture}.vocab_size": info.vocab_size,
            },
            "capabilities": able,
            "modified_at": self._started,
        }
        return json_response(shown)

    async def embed(self, request: web.Request) -> web.Response:
        body = await read_body(request, EmbedBody)
        model = check_name(self._gateway, body.model)
        size = self._gateway.engine.info.hidden_size
        if body.dimensions is not None and not 0 < body.dimensions <= size:
            raise InvalidParameter("dimensions", f"dimensions must be from 1 to {size}")
        texts = [body.input] if isinstance(body.input, str) else body.input
        account = admitted()
        found = await find_vectors(
            self._gateway,
            [Prompt(text=text).parts() for text in texts],
            None,
            normalise=True,
            dimensions=body.dimensions,
            namespace=namespace_of(account, body.cache_salt),
            account=account,
            source=source(),
            adapter=adapter_of(self._gateway, model),
            handling=handling_without_pin(body),
        )
        total = sum(vector.prompt_tokens for vector in found)
        cached = sum(vector.cached_tokens for vector in found)
        note_usage(Usage(prompt_tokens=total, cached_tokens=cached), None)
        reply: Embedded = {
            "model": model,
            "embeddings": [vector.values.tolist() for vector in found],
            "prompt_eval_count": total,
        }
        return json_response(reply)

    async def _entry(self) -> Entry:
        info = self._gateway.model_info
        return await asyncio.to_thread(entry_of, info.name, info.path, self._started)


def entry_of(name: str, path: str, modified_at: str) -> Entry:
    """A model as Ollama lists it. Reads its files, which may take a while the first time."""
    size, digest = _files_at(Path(path))
    return {
        "name": name,
        "model": name,
        "modified_at": modified_at,
        "size": size,
        "digest": digest,
        "details": _details(_about(path, digest)),
    }


def running_of(gateway: Gateway, entry: Entry, expires_at: str = NEVER) -> Entry:
    """A model as Ollama lists it where it is loaded."""
    on_cpu = gateway.engine.info.device == "cpu"
    return {
        **entry,
        "expires_at": expires_at,
        "size_vram": 0 if on_cpu else entry["size"],
        "context_length": gateway.model_info.context_length,
    }


def _files_at(path: Path) -> tuple[int, str]:
    """The bytes of a model's files, and a digest that changes when they do."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    size, found = 0, []
    for file in files:
        if file.is_file() and not file.name.startswith("."):
            about = file.stat()
            size += about.st_size
            found.append(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}")
    return size, hashlib.sha256("\0".join(found or [str(path)]).encode()).hexdigest()


@lru_cache(maxsize=64)
def _about(path: str, digest: str) -> About:
    """What the files of that digest say of the model; nothing where there is no model."""
    try:
        return model_source(path).about()
    except RootlaceError:
        return About("", "", None, "", {})


def _details(about: About) -> Details:
    return {
        "parent_model": "",
        "format": about.format,
        "family": about.architecture,
        "families": [about.architecture] if about.architecture else [],
        "parameter_size": "" if about.numbers is None else _shown(about.numbers),
        "quantization_level": about.stored,
    }


def _shown(numbers: int) -> str:
    """As Ollama writes how many there are: 134.52M, 8.0B."""
    if numbers >= 1e9:
        return f"{numbers / 1e9:.1f}B"
    return f"{numbers / 1e6:.2f}M" if numbers >= 1e6 else f"{numbers / 1e3:.0f}K"
