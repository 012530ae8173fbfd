"""The files of the page: their headers, and that no other file is served."""

import re

import pytest

from rootlace.runtime.assets import page_folder
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel


async def test_the_page_may_load_nothing_from_elsewhere(served: Served) -> None:
    async with served.http.get("/") as reply:
        assert reply.content_type == "text/html"
        assert "default-src 'self'" in reply.headers["Content-Security-Policy"]
        named = set(re.findall(r'(?:src|href)="([^"]*)"', await reply.text()))
    assert named == {"page/icon.svg", "page/style.css", "page/main.js", "docs"}
    kinds = set()
    for path in page_folder().iterdir():
        async with served.http.get(f"/page/{path.name}") as reply:
            assert reply.status == 200 and await reply.read() == path.read_bytes()
            kinds.add(reply.content_type)
    assert kinds == {"text/html", "text/css", "text/javascript", "image/svg+xml"}


async def test_what_the_browser_has_is_not_sent_again(served: Served) -> None:
    tag = (await served.get("/page/main.js")).headers["ETag"]
    async with served.http.get("/page/main.js", headers={"If-None-Match": tag}) as reply:
        assert reply.status == 304 and await reply.read() == b""
    assert (await served.get("/page/main.js", headers={"If-None-Match": '"old"'})).status == 200


@pytest.mark.parametrize("name", ["none.js", "..%2f__init__.py", "%2e%2e%2f__init__.py"])
async def test_no_other_file(served: Served, name: str) -> None:
    assert (await served.get(f"/page/{name}")).status == 404


async def test_the_page_needs_no_key_and_what_it_asks_does(serve: Serve) -> None:
    served = await serve(FakeModel(api_key="secret"))
    for path, status in (
        ("/", 200),
        ("/page/main.js", 200),
        ("/docs", 200),
        ("/openapi.json", 200),
        ("/v1/models", 401),
    ):
        assert (await served.get(path)).status == status
