"""`GET /openapi.json`, and the same for people at `GET /docs`: one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from aiohttp import web

from rootlace.runtime.gateway.http.endpoint import Endpoint
from rootlace.runtime.gateway.http.reference import Field, fields, openapi, shown_path
from rootlace.runtime.gateway.http.replies import json_response

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
code, h2 { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
td, th { border-top: 1px solid var(--line); padding: .25rem .5rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
nav { columns: 16rem; font-size: .875rem; } nav a { display: block; }
.refused td:first-child { text-decoration: line-through; } .ignored, .refused { opacity: .65; }
summary { cursor: pointer; }
"""


class Reference:
    """The handlers. `endpoints` is the list of all; it may still grow when this is made."""

    def __init__(self, model: Callable[[], str], endpoints: Sequence[Endpoint]) -> None:
        """`model` gives the name of the served one, for examples."""
        self._model = model
        self._endpoints = endpoints

    async def openapi(self, request: web.Request) -> web.Response:
        return json_response(openapi(self._endpoints, self._model()))

    async def page(self, request: web.Request) -> web.Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return web.Response(
            text=reference_page(self._endpoints, self._model()),
            content_type="text/html",
            headers={"Content-Security-Policy": policy},
        )


def reference_page(endpoints: Sequence[Endpoint], name: str) -> str:
    """The page."""
    links = "".join(
        f'<a href="#{_anchor(endpoint)}">{escape(_title(endpoint))}</a>' for endpoint in endpoints
    )
    sections = "".join(map(_section, endpoints))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Rootlace: {escape(name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(name)}, served by Rootlace</h1>"
        '<p>To try it: <a href="./">the playground</a>. '
        'The same for machines: <a href="openapi.json">openapi.json</a>. '
        "Every field may be null, which means its default.</p>"
        f"<nav>{links}</nav>{sections}</body></html>"
    )


def _section(endpoint: Endpoint) -> str:
    title, says = escape(_title(endpoint)), escape(endpoint.says)
    head = f'<h2 id="{_anchor(endpoint)}">{title}</h2><p>{says}</p>'
    body = None if endpoint.other_body else endpoint.body
    for title, kind in (("Fields", body), ("Query", endpoint.query)):
        if kind is not None:
            head += _table(title, map(_row, fields(kind)))
    if endpoint.reply is not None and (found := fields(endpoint.reply)):
        head += _table("Reply", (_reply_row(field) for field in found))
    return head


def _table(title: str, rows: Iterable[str]) -> str:
    return f"<details><summary>{title}</summary><table>{''.join(rows)}</table></details>"


def _reply_row(field: Field) -> str:
    says = "" if field.required else "Where there is one."
    return (
        f"<tr><td><code>{escape(field.path)}</code></td><td>{escape(field.type)}</td>"
        f"<td>{says}</td></tr>"
    )


def _row(field: Field) -> str:
    kind = field.standing.kind if field.standing else "served"
    says = str(field.standing) if field.standing else "Required." if field.required else ""
    return (
        f'<tr class="{kind}"><td><code>{escape(field.path)}</code></td>'
        f"<td>{escape(field.type)}</td><td>{escape(says)}</td></tr>"
    )


def _title(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {shown_path(endpoint)}"


def _anchor(endpoint: Endpoint) -> str:
    return escape(_title(endpoint).replace(" ", "").replace("{", "").replace("}", ""))
