"""Content types of bodies."""

from typing import cast

import pytest

from rootlace.runtime.server.http.app import endpoints
from rootlace.runtime.server.served_model import ServedModel
from tests.server.http.conftest import Served


async def test_bodies_say_that_they_are_json(served: Served) -> None:
    """Types that a page can send to any server are refused; the error helps users of curl."""
    posts = [one for one in endpoints(cast(ServedModel, served.model)) if one.method == "POST"]
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
    assert not served.model.sessions and not served.model.flushed
    for given in ("Application/JSON; charset=utf-8", "application/octet-stream"):
        headers = {"Content-Type": given}
        async with served.http.post("/generate", data=b'{"text": "a"}', headers=headers) as reply:
            assert reply.status == 200, headers


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", b'{"text": "a"}', 415),
        ("/v1/completions", b'{"prompt": "a"}', 415),
        ("/api/generate", b'{"model": "fake", "prompt": "a", "stream": false}', 200),
        ("/flush_cache", b"", 200),
        ("/v1/files", b"", 415),  # the type says where the parts of a form end
    ],
)
async def test_a_body_of_no_type_is_taken_by_the_paths_of_ollama_alone(
    served: Served, path: str, body: bytes, status: int
) -> None:
    """Clients that are no browser may leave the type out. Of empty bodies only a form needs one."""
    assert (await served.post(path, data=body, skip_auto_headers=["Content-Type"])).status == status
