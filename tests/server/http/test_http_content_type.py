"""Of which types a body may be."""

from typing import cast

from rootlace.runtime.server.http.app import endpoints
from rootlace.runtime.server.served_model import ServedModel
from tests.server.http.conftest import Served


async def test_bodies_say_that_they_are_json(served: Served) -> None:
    """What a page can send to any server is refused everywhere, and curl's user told what to do."""
    posts = [one for one in endpoints(cast(ServedModel, served.gateway)) if one.method == "POST"]
    assert len(posts) > 20
    for one in posts:
        path = one.path.replace("{id}", "x")
        for given in ("text/plain; application/json", "application/x-www-form-urlencoded", ""):
            headers = {"Content-Type": given} if given else {"Sec-Fetch-Site": "same-origin"}
            async with served.http.post(
                path, data=b"{}", headers=headers, skip_auto_headers=["Content-Type"]
            ) as reply:
                said = await reply.text()
                assert reply.status == 415, path
            assert (given or "of no type").partition(";")[0] in said
            assert f"Content-Type: {one.takes}" in said
    assert not served.gateway.sessions and not served.gateway.flushed
    for given in ("Application/JSON; charset=utf-8", "application/octet-stream", ""):
        headers = {"Content-Type": given} if given else {}
        async with served.http.post(
            "/generate", data=b'{"text": "a"}', headers=headers, skip_auto_headers=["Content-Type"]
        ) as reply:
            assert reply.status == 200, headers
