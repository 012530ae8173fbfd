"""`rootlace cache`: what a running server's cache holds, and why a prompt misses it."""

from __future__ import annotations

import json
import re
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.common import URL, ApiKey, Url, ask, fail

if TYPE_CHECKING:
    from rich.tree import Tree

_MARK = re.compile(r"<[|\w][^<>\s]{2,}>|\[/?[A-Z_]{3,}\]")

_UNWRAPPED = 10_000

cache = typer.Typer(help="Look into a running server's cache.", no_args_is_help=True)

Salt = Annotated[str, typer.Option("--cache-salt", help="Whose part of the cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as it is.")]


@cache.command()
def explain(
    file: Annotated[
        str,
        typer.Argument(
            help="A text, or the JSON body of a (chat) completion; - for standard input."
        ),
    ],
    *,
    url: Url = URL,
    api_key: ApiKey = "",
    cache_salt: Salt = "",
    as_json: AsJson = False,
) -> None:
    """Say how far a prompt is cached, and why no further. Nothing is computed."""
    body = _body(_read(file))
    plain = body.keys() == {"prompt"}
    if cache_salt:
        body["cache_salt"] = cache_salt
    report = ask(url, "/cache/explain", api_key, body)
    typer.echo(json.dumps(report, indent=1, ensure_ascii=False) if as_json else report["says"])
    if plain and report["reason"] != "whole":
        template = ask(url, "/tokenizer_info", api_key).get("chat_template")
        if template is not None and not _is_rendered(body["prompt"], template):
            typer.echo(
                "The file was explained as it stands, but this model has a chat template, which "
                'chats are written by: for a chat, give its JSON body ({"messages": [...]}).',
                err=True,
            )


@cache.command()
def tree(
    *,
    url: Url = URL,
    api_key: ApiKey = "",
    cache_salt: Salt = "",
    limit: Annotated[int, typer.Option(min=1, max=2000, help="Nodes to show.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Draw what the cache holds, what was used last first."""
    query = urllib.parse.urlencode({"namespace": cache_salt, "limit": limit})
    page = ask(url, f"/cache/tree?{query}", api_key)
    if as_json:
        typer.echo(json.dumps(page, indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    # Where it is no terminal, a node is a line.
    width = None if sys.stdout.isatty() else _UNWRAPPED
    Console(highlight=False, width=width).print(_drawn(page))


@cache.command()
def lint(
    *, url: Url = URL, api_key: ApiKey = "", cache_salt: Salt = "", as_json: AsJson = False
) -> None:
    """List what keeps prompts from sharing more of the cache, what cost most first."""
    query = urllib.parse.urlencode({"namespace": cache_salt})
    findings = ask(url, f"/cache/lint?{query}", api_key)["findings"]
    if as_json:
        typer.echo(json.dumps(findings, indent=1, ensure_ascii=False))
    elif not findings:
        typer.echo("Nothing was noticed.")
    for finding in [] if as_json else findings:
        typer.echo(f"{finding['tokens_lost']:>10,} tokens  {finding['says']}")


@cache.command()
def flush(*, url: Url = URL, api_key: ApiKey = "") -> None:
    """Forget every cached prefix that no running request uses."""
    ask(url, "/flush_cache", api_key, {})
    typer.echo("The cache is empty, but for what running requests use.")


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file}: {getattr(error, 'strerror', None) or error}")


def _body(text: str) -> dict[str, Any]:
    """The body to explain: a saved completion or chat completion, or a text as prompt."""
    try:
        given = json.loads(text)
    except ValueError:
        return {"prompt": text}
    if not isinstance(given, dict):
        return {"prompt": text}
    return given


def _is_rendered(prompt: str, template: str) -> bool:
    """Whether a text has one of the marks, such as <|im_start|>, that a template writes."""
    return any(mark in prompt for mark in _MARK.findall(template))


def _drawn(page: dict[str, Any]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    shown, total = len(page["nodes"]), page.get("total")
    said = f"{shown:,} nodes" if total is None else f"{total:,} nodes, {page['tokens']:,} tokens"
    root = Tree(said + ("" if page.get("complete", True) else f"; {shown:,} shown"))
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
