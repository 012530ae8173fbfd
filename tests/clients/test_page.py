"""The page at `/` in a headless Chromium: chat, constrained answers, the tree, the charts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import rootlace as rl

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
PATIENCE_MS = 60_000


@dataclass
class Tab:
    """The page in a tab, what its console said, and which addresses it asked."""

    page: playwright.Page
    console: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def answer(self, number: int) -> playwright.Locator:
        """The `number`-th turn that the model wrote, complete."""
        turn = self.page.locator(".turn", has=self.page.locator(".who", has_text="model"))
        turn.nth(number).locator(".facts", has_text="tokens/s").wait_for()
        return turn.nth(number)


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def tab(browser: playwright.Browser, url: str) -> Iterator[Tab]:
    """Nothing may go to another address, and the console must stay silent."""
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_default_timeout(PATIENCE_MS)
    found = Tab(page)
    page.on("console", lambda message: found.console.append(message.text))
    page.on("pageerror", lambda error: found.console.append(str(error)))
    page.on("request", lambda request: found.asked.add(request.url))
    page.goto(url)
    page.locator("#model", has_text="demo").wait_for()
    yield found
    page.close()
    assert found.console == []
    assert all(asked.startswith(url) for asked in found.asked), found.asked


def test_a_conversation(tab: Tab) -> None:
    page = tab.page
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "12")
    page.fill("#prompt", "Hello!")
    page.keyboard.press("Control+Enter")
    first = tab.answer(0)
    assert first.locator(".text").inner_text()
    tokens = first.locator(".token")
    assert 1 <= tokens.count() <= 12
    tokens.first.hover()
    assert "%" in page.locator("#hover").inner_text()
    assert "cached" in first.locator(".facts").inner_text()
    # The next turn finds the one before in the cache.
    page.fill("#prompt", "And you?")
    page.click("#send")
    assert "were cached" in tab.answer(1).locator(".facts").inner_text()
    page.click("#fresh")
    assert page.locator(".turn").count() == 0


def test_an_answer_in_the_form_of_a_schema(tab: Tab) -> None:
    page = tab.page
    page.fill("#max_tokens", "60")
    page.click("#form-of-answer summary")
    page.click("#field")
    page.locator("#fields input").fill("name")
    page.click("#field")
    page.locator("#fields input").nth(1).fill("age")
    page.locator("#fields select").nth(1).select_option("integer")
    page.fill("#prompt", "Ida Lund is 47 years old.")
    page.click("#send")
    answer = tab.answer(0)
    read = json.loads(answer.locator(".text").inner_text())
    assert set(read) == {"name", "age"} and isinstance(read["age"], int)
    assert answer.locator(".token.forced").count() > 0
    assert "forced" in answer.locator(".facts").inner_text()


def test_tools_are_called_and_the_request_is_copied(tab: Tab) -> None:
    page = tab.page
    page.fill("#temperature", "0")
    page.locator("details", has=page.locator("#tools")).locator("summary").click()
    page.fill("#tools", json.dumps([TOOL]))
    page.fill("#prompt", "What's the weather in Oslo?")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#as-python")
    page.locator("#as-python", has_text="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    page.click("#send")
    tab.answer(0).locator(".text", has_text="→ weather").wait_for()
    called = tab.answer(0).inner_text()
    given: dict[str, Any] = {}
    exec(copied, given)
    (call,) = given["reply"].choices[0].message.tool_calls
    assert f"{call.function.name} {call.function.arguments}" in called


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_what_is_wrong_is_told(tab: Tab) -> None:
    page = tab.page
    page.click("#form-of-answer summary")
    page.select_option("#constraint", "regex")
    page.fill("#source", "(")
    page.fill("#prompt", "Hi")
    page.click("#send")
    page.locator(".turn .bad").wait_for()
    assert "regex" in page.locator(".turn .bad").inner_text()
    tab.console.clear()  # browsers tell of every reply that is an error


def test_the_tree_grows(tab: Tab, url: str) -> None:
    page = tab.page
    page.keyboard.press("Escape")
    page.click("#tab-tree")
    total = page.locator("#tree-sum", has_text="nodes")
    total.wait_for()

    @rl.function
    def forked(s) -> None:
        s += "Once upon a time there was a page that drew a tree."
        forks = s.fork(3)
        forks += lambda i: f" Branch {i}:" + rl.gen("next", max_tokens=4, temperature=0)
        forks.join()

    def nodes() -> int:
        return int(total.inner_text().partition(" ")[0].replace(",", ""))

    before = nodes()
    forked.run(backend=rl.RuntimeEndpoint(url))
    for _ in range(PATIENCE_MS // 100):
        if nodes() >= before + 3:
            break
        page.wait_for_timeout(100)
    assert nodes() >= before + 3
    # By keyboard to a node, whose text is then told.
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowDown")
    page.locator("#node", has_text="tokens").wait_for()
    drawn = page.evaluate(
        "() => { const c = document.getElementById('canvas');"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x) }"
    )
    assert drawn


def test_the_charts_and_the_phone(tab: Tab) -> None:
    page = tab.page
    page.keyboard.press("3")
    page.locator("figure").first.wait_for()
    page.locator("path.line[d*=L]").first.wait_for(state="attached")
    page.set_viewport_size({"width": 360, "height": 740})
    for view in ("1", "2", "3"):
        page.keyboard.press(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.keyboard.press("t")
    first = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert {first, page.evaluate("document.documentElement.dataset.theme")} == {"light", "dark"}


def test_one_of_several_models_is_chosen(tab: Tab) -> None:
    """The server's answers are those of a second model, too: what counts is who is asked."""
    page = tab.page
    cards = {"data": [{"id": "demo", "parent": None}, {"id": "other", "parent": None}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=cards))
    named = re.compile("[?&]model=.*")
    page.route(named, lambda route: route.continue_(url=named.sub("", route.request.url)))
    page.reload()
    page.locator("#model:enabled").wait_for()
    page.keyboard.press("Escape")
    page.click("#tab-tree")
    page.locator("#tree-sum", has_text="nodes").wait_for()
    with page.expect_request(re.compile(r"cache/tree\?.*&model=other")):
        page.select_option("#model", "other")
    page.locator("#tree-sum", has_text="nodes").wait_for()
    with page.expect_request("**/cache/lint?model=other"):
        page.click("#tab-load")
    page.click("#tab-play")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#send")
    assert asked.value.post_data_json["model"] == "other"
