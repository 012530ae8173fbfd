"""Writes docs/api.md and the table of sampling parameters in docs/language.md.

The first has every endpoint's fields, by the types that decode its bodies; the second follows the
descriptions of `rootlace.wire.sampling`.

python scripts/api_reference.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rootlace.runtime.server.http.app import endpoints
from rootlace.runtime.server.http.endpoint import Field, fields, shown_path
from rootlace.runtime.server.served_model import ServedModel
from rootlace.wire.sampling import PARAMETERS, Parameter

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, LANGUAGE = DOCS / "api.md", DOCS / "language.md"
BEGIN, END = "<!-- sampling parameters -->\n\n", "\n\n<!-- end of sampling parameters -->"

INTRODUCTION = """# The HTTP interface, field by field

Written by `scripts/api_reference.py` from the types that decode requests; a running server shows
the same at `/docs` and `/openapi.json`. [`http.md`](http.md) says what it means.

A field is *served*; or *accepted* although it changes nothing here, so that clients that send it
work; or *refused*, unless it asks for nothing. Every other field is an error that names the nearest
one. Every field may be null, which means its default.
"""


def page() -> str:
    """Return the whole of docs/api.md."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    # No handler is called, so no gateway is needed.
    for endpoint in endpoints(cast(ServedModel, None)):
        yield f"## `{endpoint.method} {shown_path(endpoint)}`\n"
        yield f"{endpoint.says[0].upper()}{endpoint.says[1:]}.\n"
        body = None if endpoint.other_body else endpoint.body
        for name, kind in (("field", body), ("of the query", endpoint.query)):
            if kind is not None:
                yield f"| {name} | type | |\n|---|---|---|"
                yield from map(_row, fields(kind))
                yield ""
        if shown := fields(endpoint.reply) if endpoint.reply is not None else []:
            yield f"Reply: {', '.join(f'`{field.path}` ({field.type})' for field in shown)}\n"


def _row(field: Field) -> str:
    if field.standing is not None:
        about = str(field.standing).rstrip(".").replace("|", "\\|")
    else:
        about = "required" if field.required else "served"
    return f"| `{field.path}` | {field.type} | {about} |"


def language_page() -> str:
    """Return docs/language.md with its table of sampling parameters from their descriptions."""
    before, _, rest = LANGUAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = [
        "| parameter | default | values | |\n|---|---|---|---|",
        *map(_parameter, PARAMETERS.values()),
    ]
    return "".join([before, BEGIN, "\n".join(table), END, after])


def _parameter(about: Parameter) -> str:
    names = ", ".join(f"`{name}`" for name in (about.name, *about.aliases))
    empty = about.default in (None, (), {})
    default = "" if empty else f"`{about.default}`"
    return f"| {names} | {default} | {_values(about)} | {about.help} |"


def _values(about: Parameter) -> str:
    if about.range is None or (about.range.high or 0) >= 1e6:
        return ""
    low, high, off = about.range
    text = f"from {low}" if high is None else f"{low} to {high}"
    return text if off is None else f"{text}, {off}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    PAGE.write_text(page(), "utf-8")
    LANGUAGE.write_text(language_page(), "utf-8")
