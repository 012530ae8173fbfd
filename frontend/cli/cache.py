"""`rootlace cache`: what a running server's cache holds, and why a prompt misses it."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.failure import fail

if TYPE_CHECKING:
    from rich.tree import Tree

cache = typer.Typer(help="Look into a running server's cache.", no_args_is_help=True)

Url = Annotated[str, typer.Option(help="The running server.")]
ApiKey = Annotated[str, typer.Option(help="The server's key.", envvar="ROOTLACE_API_KEY")]
Salt = Annotated[str, typer.Option("--cache-salt", help="Whose part of the cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")]

_URL = "http://127.0.0.1:30000"
_TIMEOUT = 60.0


@cache.command()
def explain(
    file: Annotated[
        str, typer.Argument(help="A prompt's text, or a request's JSON body; - for standard input.")
    ],
    *,
    url: Url = _URL,
    api_key: ApiKey = "",
    cache_salt: Salt = "",
    as_json: AsJson = False,
) -> None:
    """Say how far a prompt is cached, and why no further. Nothing is computed."""
    body = _body(_read(file))
    if cache_salt:
        body["cache_salt"] = cache_salt
    report = _ask(url, "/cache/explain", api_key, body)
    typer.echo(json.dumps(report, indent=1, ensure_ascii=False) if as_json else report["says"])


@cache.command()
def tree(
    *,
    url: Url = _URL,
    api_key: ApiKey = "",
    cache_salt: Salt = "",
    limit: Annotated[int, typer.Option(min=1, max=2000, help="Nodes to show.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Draw what the cache holds, what was used last first."""
    query = urllib.parse.urlencode({"namespace": cache_salt, "limit": limit})
    page = _ask(url, f"/cache/tree?{query}", api_key)
    if as_json:
        typer.echo(json.dumps(page, indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    Console(highlight=False).print(_drawn(page))


@cache.command()
def lint(
    *, url: Url = _URL, api_key: ApiKey = "", cache_salt: Salt = "", as_json: AsJson = False
) -> None:
    """List what keeps prompts from sharing more of the cache, what cost most first."""
    query = urllib.parse.urlencode({"namespace": cache_salt})
    findings = _ask(url, f"/cache/lint?{query}", api_key)["findings"]
    if as_json:
        typer.echo(json.dumps(findings, indent=1, ensure_ascii=False))
    elif not findings:
        typer.echo("Nothing was noticed.")
    for finding in [] if as_json else findings:
        typer.echo(f"{finding['tokens_lost']:>10,} tokens  {finding['says']}")


@cache.command()
def flush(*, url: Url = _URL, api_key: ApiKey = "") -> None:
    """Forget every cached prefix that no running request uses."""
    _ask(url, "/flush_cache", api_key, {})
    typer.echo("The cache is empty, but for what running requests use.")


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file}: {getattr(error, 'strerror', None) or error}")


def _body(text: str) -> dict[str, Any]:
    """What to explain: a request that was saved (only what makes its prompt counts), or text."""
    try:
        given = json.loads(text)
    except ValueError:
        return {"prompt": text}
    if not isinstance(given, dict) or not {"prompt", "messages"} & given.keys():
        return {"prompt": text}
    known = ("prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt")
    return {name: given[name] for name in (*known, "cache_salt") if name in given}


def _ask(url: str, path: str, api_key: str, body: dict[str, Any] | None = None) -> Any:
    """The server's answer; ends the command where there is none, or an error."""
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
        fail(f"{url}: {_message(error.read()) or error}")
    except (OSError, ValueError) as error:
        fail(f"there is no server at {url}: {getattr(error, 'reason', error)}")


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _drawn(page: dict[str, Any]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    shown = len(page["nodes"])
    total, tokens = page["total"], page["tokens"]
    root = Tree(f"{total:,} nodes, {tokens:,} tokens" + (f"; {shown:,} shown" * (shown < total)))
    drawn: dict[int, Tree] = {}
    for node in page["nodes"]:
        text = node.get("head_text", "")
        if tail := node.get("tail_text"):
            text += f" … {tail}"
        label = Text(f"{node['end'] - node['start']:,} ", style="bold")
        label.append(repr(text)[1:-1], style="dim")
        label.append(f"  {_state(node)}")
        drawn[node["id"]] = drawn.get(node["parent"], root).add(label)
    return root


def _state(node: dict[str, Any]) -> str:
    said = [f"used {node.get('uses', 0):,} times", f"{node.get('idle_seconds', 0.0):.0f} s ago"]
    if node.get("requests"):
        said.append(f"{len(node['requests'])} running")
    said += node.get("programs", [])
    return ", ".join(said)
