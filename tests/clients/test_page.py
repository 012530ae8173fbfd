"""The page at `/` in a headless Chromium: chat, constrained answers, the tree, the charts.

Where an answer must stop, break or call at a certain word, `SCRIPTED` stands for the server.
"""

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

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

# Answers that a test gives word by word; `sent` has the requests' bodies.
SCRIPTED = """() => {
  const real = window.fetch;
  const bytes = (text) => new TextEncoder().encode(`data: ${text}\\n\\n`);
  window.sent = [];
  window.fetch = async (path, options) => {
    if (!path.startsWith("v1/chat/")) return real(path, options);
    window.sent.push(JSON.parse(options.body));
    return new Response(new ReadableStream({ start(stream) {
      window.say = (delta) => stream.enqueue(bytes(JSON.stringify({ choices: [{ delta }] })));
      window.done = () => { stream.enqueue(bytes("[DONE]")); stream.close(); };
      window.cut = () => stream.close();
      options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
    } }));
  };
}"""


@dataclass
class Tab:
    """The page in a tab, its console's messages, and the addresses that it requested."""

    page: playwright.Page
    console: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def answer(self, number: int) -> playwright.Locator:
        """Wait for the `number`-th turn of the model to be complete; return the turn."""
        turn = self.page.locator(".turn", has=self.page.locator(".who", has_text="model"))
        turn.nth(number).locator(".facts", has_text="tokens/s").wait_for()
        return turn.nth(number)


@dataclass
class Script:
    """Answers in a tab in place of the server."""

    page: playwright.Page

    def ask(self, prompt: str) -> None:
        self.page.fill("#prompt", prompt)
        self.page.keyboard.press("Control+Enter")
        self.page.locator("#stop:enabled").wait_for()

    def say(self, content: str) -> None:
        self.page.evaluate("(content) => say({ content })", content)
        self.page.locator(".turn .text", has_text=content).last.wait_for()

    def call(self, *calls: tuple[str, str]) -> None:
        for index, (name, arguments) in enumerate(calls):
            made: dict[str, Any] = {"index": index, "id": f"call-{index}"}
            made["function"] = {"name": name, "arguments": arguments}
            self.page.evaluate("(call) => say({ tool_calls: [call] })", made)

    def end(self, how: str = "done()") -> None:
        self.page.evaluate(how)
        self.page.locator("#stop:disabled").wait_for()

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the last request."""
        found: list[dict[str, Any]] = self.page.evaluate("sent.at(-1).messages")
        return found


def click_copy(page: playwright.Page, button: str) -> None:
    """Click, and wait until the button says for a second that it copied."""
    page.evaluate(
        "(id) => { const button = document.getElementById(id); window.said = [];"
        " new MutationObserver(() => said.push(button.textContent))"
        ".observe(button, { childList: true }); }",
        button,
    )
    page.click(f"#{button}")
    for _ in range(PATIENCE_MS // 20):
        if page.evaluate("said.includes('Copied')"):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{button} never said so")


@pytest.fixture
def script(tab: Tab) -> Script:
    tab.page.evaluate(SCRIPTED)
    return Script(tab.page)


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def tab(browser: playwright.Browser, url: str) -> Iterator[Tab]:
    """Open the page; it may request no other address, and its console must stay silent."""
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
    # The same by keyboard, token by token.
    page.mouse.move(0, 0)
    assert page.locator("#hover").count() == 0
    first.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    told = page.locator("#hover td", has_text="●").locator("xpath=../td[2]").inner_text()
    assert json.loads(told) == tokens.first.text_content()
    page.keyboard.press("Tab")
    assert page.locator("#hover").count() == 0
    # The next turn finds the previous one in the cache.
    assert page.input_value("#prompt") == ""
    page.fill("#prompt", "And you?")
    page.click("#send")
    assert "were cached" in tab.answer(1).locator(".facts").inner_text()
    page.click("#fresh")
    assert page.locator(".turn").count() == 0
    page.click("#undo")
    assert page.locator(".turn").count() == 4 and page.locator("#undo").is_hidden()


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
    click_copy(page, "as-python")
    copied = page.evaluate("navigator.clipboard.readText()")
    page.click("#send")
    tab.answer(0).locator(".text", has_text="→ weather").wait_for()
    called = tab.answer(0).inner_text()
    given: dict[str, Any] = {}
    exec(copied, given)
    (call,) = given["reply"].choices[0].message.tool_calls
    assert f"{call.function.name} {call.function.arguments}" in called


def test_what_is_wrong_is_told(tab: Tab) -> None:
    page = tab.page
    page.click("#form-of-answer summary")
    page.select_option("#constraint", "regex")
    page.fill("#source", "(")
    page.fill("#prompt", "Hi")
    page.click("#send")
    page.locator(".turn .bad").wait_for()
    assert "regex" in page.locator(".turn .bad").inner_text()
    tab.console.clear()  # browsers report every reply that is an error


def test_the_tree_grows(tab: Tab, url: str) -> None:
    page = tab.page
    page.keyboard.press("Escape")
    page.click("#tab-tree")
    total = page.locator("#tree-sum", has_text="node")
    total.wait_for()

    @rl.function
    def forked(s) -> None:
        s += "Once upon a time there was a page that drew a tree."
        forks = s.fork(3)
        forks += lambda i: f" Branch {i}:" + rl.gen("next", max_tokens=4, temperature=0)
        forks.join()

    def nodes() -> int:
        return int(total.inner_text().partition(" ")[0].replace(",", ""))

    # Below the axis lies the first node.
    page.locator("#canvas").click(position={"x": 10, "y": 26})
    page.locator("#node", has_text="tokens 0 to").wait_for()
    page.locator("#canvas").click(position={"x": 10, "y": 10})
    page.locator("#node", has_not_text="tokens").wait_for(state="attached")

    before = nodes()
    forked.run(backend=rl.RuntimeEndpoint(url))
    for _ in range(PATIENCE_MS // 100):
        if nodes() >= before + 3:
            break
        page.wait_for_timeout(100)
    assert nodes() >= before + 3
    # Arrow keys move to a node, whose text is then shown.
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowDown")
    page.locator("#node", has_text="tokens").wait_for()
    drawn = page.evaluate(
        "() => { const c = document.getElementById('canvas');"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x) }"
    )
    assert drawn
    # Deep in the tree, arrow keys scroll the chosen node into view.
    left, right, back = page.evaluate(
        """async () => {
          const { TreeView } = await import("/page/tree.js");
          const tree = new TreeView(() => {});
          tree.take({ nodes: [
            { id: 1, parent: 0, start: 0, end: 900 }, { id: 2, parent: 1, start: 900, end: 990 },
          ] });
          tree.view = { x: 0, y: 0, sx: 10, sy: 18 };
          tree.choose(tree.nodes[0]);
          const press = (key) => tree.key({ key, preventDefault: () => {} });
          press("ArrowRight");
          const { x, sx } = tree.place();
          press("ArrowLeft");
          return [x, x + tree.canvas.clientWidth / sx, tree.place().x];
        }"""
    )
    assert left < 900 < right and back == 0


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
    """The server's answers name a second model, too; the request must name the chosen one."""
    page = tab.page
    cards = {"data": [{"id": "demo", "parent": None}, {"id": "other", "parent": None}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=cards))
    named = re.compile("[?&]model=.*")
    page.route(named, lambda route: route.continue_(url=named.sub("", route.request.url)))
    page.reload()
    page.locator("#model:enabled").wait_for()
    page.keyboard.press("Escape")
    page.click("#tab-tree")
    page.locator("#tree-sum", has_text="node").wait_for()
    with page.expect_request(re.compile(r"cache/tree\?.*&model=other")):
        page.select_option("#model", "other")
    page.locator("#tree-sum", has_text="node").wait_for()
    with page.expect_request("**/cache/lint?model=other"):
        page.click("#tab-load")
    page.click("#tab-play")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#send")
    assert asked.value.post_data_json["model"] == "other"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def model(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_what_is_typed_while_an_answer_is_written_stays(tab: Tab, script: Script) -> None:
    page = tab.page
    script.ask("One?")
    assert page.input_value("#prompt") == ""
    page.keyboard.type("Two?")
    script.say("First")
    page.keyboard.press("Control+Enter")  # too early: sends nothing, loses nothing
    script.end()
    assert page.input_value("#prompt") == "Two?"
    page.keyboard.press("Control+Enter")
    script.say("Second")
    script.end()
    assert script.messages() == [user("One?"), model("First"), user("Two?")]
    # The same after a click: keys are no shortcuts there.
    page.fill("#prompt", "Three?")
    page.click("#send")
    page.locator("#stop:enabled").wait_for()
    page.keyboard.type("that takes 3 steps")
    page.keyboard.press("Escape")
    page.locator("#stop:disabled").wait_for()
    assert page.input_value("#prompt") == "that takes 3 steps"
    assert page.locator("#play").is_visible()
    assert page.evaluate("document.documentElement.dataset.theme") is None
    # A completion's prompt always stays, for the user to change.
    page.select_option("#kind", "text")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "4")
    page.fill("#prompt", "Once upon a time")
    page.click("#send")
    turn = page.locator(".turn", has=page.locator(".who", has_text="completion"))
    turn.locator(".facts", has_text="tokens/s").wait_for()
    assert page.input_value("#prompt") == "Once upon a time"
    assert turn.locator(".text").inner_text().startswith("Once upon a time")


def test_the_next_request_sends_what_the_page_shows(tab: Tab, script: Script) -> None:
    page = tab.page
    script.ask("One?")
    script.say("Half of")
    page.click("#stop")
    page.locator(".facts", has_text="stopped").wait_for()
    script.ask("Two?")
    script.say("Second")
    script.end()
    assert script.messages() == [user("One?"), model("Half of"), user("Two?")]
    # Stopped before the first word: marked so, and left out of the conversation.
    script.ask("Three?")
    page.keyboard.press("Escape")
    page.locator(".turn.left").nth(1).wait_for()
    assert (
        page.locator(".turn.left .note").all_inner_texts() == ["left out of the next request"] * 2
    )
    assert page.input_value("#prompt") == "Three?"
    # The same question is asked again, and appears only once.
    page.locator("button:visible", has_text="Again").click()
    script.say("Third")
    script.end()
    assert script.messages()[3:] == [model("Second"), user("Three?")]
    assert page.input_value("#prompt") == "" and page.locator(".turn.left").count() == 0
    # A repeated question leaves the text that is being typed.
    page.fill("#prompt", "Four?")
    page.locator("button:visible", has_text="Again").click()
    script.say("Another third")
    script.end()
    assert script.messages()[-1] == user("Three?") and page.input_value("#prompt") == "Four?"
    # The second question returns to the input, in front of the typed text.
    page.locator(".turn", has_text="Two?").get_by_role("button", name="Edit").click()
    assert page.input_value("#prompt") == "Two?\nFour?"
    page.locator("#prompt").press("Control+Enter")
    script.say("Fourth")
    # A new conversation replaces one that is being answered; Undo restores it.
    page.click("#fresh")
    page.locator("#stop:disabled").wait_for()
    page.click("#undo")
    script.ask("Why?")
    assert script.messages()[-2:] == [model("Fourth"), user("Why?")]
    page.click("#fresh")
    page.locator("#stop:disabled").wait_for()
    page.fill("#prompt", "")
    script.ask("Five?")
    script.say("Fifth")
    script.end()
    assert script.messages() == [user("Five?")]
    assert page.locator(".turn").count() == 2


def test_an_answer_that_breaks_off_says_so_and_keeps_its_words(tab: Tab, script: Script) -> None:
    page = tab.page
    script.ask("One?")
    script.say("Half of")
    script.end("cut()")
    assert "connection broke" in page.locator(".turn .bad").last.inner_text()
    script.ask("Two?")
    script.say("Second")
    script.end()
    assert script.messages() == [user("One?"), model("Half of"), user("Two?")]
    # A refused request leaves the conversation; its words return to the input.
    page.select_option("#constraint", "regex", force=True)
    page.evaluate("document.getElementById('source').value = '('")
    page.reload()
    page.locator("#model", has_text="demo").wait_for()
    page.fill("#prompt", "Three?")
    page.keyboard.press("Control+Enter")
    page.locator(".turn.left .bad", has_text="regex").wait_for()
    assert page.input_value("#prompt") == "Three?"
    tab.console.clear()  # browsers report every reply that is an error


def test_loading_again_loses_nothing(tab: Tab, script: Script) -> None:
    page = tab.page
    page.fill("#temperature", "0.3")
    page.fill("#system", "Be brief.")
    page.click("#form-of-answer summary")
    page.select_option("#constraint", "regex")
    page.fill("#source", "[a-z ]+")
    page.select_option("#constraint", "json_schema")
    page.fill("#source", '{"type": "object", "properties": {"age": {"type": "integer"}}}')
    page.select_option("#constraint", "")
    script.ask("One?")
    script.say("First")
    script.end()
    script.ask("Two?")
    script.say("Half of")
    page.keyboard.type("Three?")
    page.reload()
    page.locator("#model", has_text="demo").wait_for()
    page.evaluate(SCRIPTED)
    assert page.input_value("#temperature") == "0.3"
    assert "stopped" in page.locator(".turn .facts").last.inner_text()
    assert page.input_value("#prompt") == "Three?"
    page.locator("#prompt").press("Control+Enter")
    script.say("Third")
    script.end()
    assert script.messages() == [
        {"role": "system", "content": "Be brief."},
        *(user("One?"), model("First"), user("Two?"), model("Half of"), user("Three?")),
    ]
    page.click("#form-of-answer summary")
    assert page.locator("#fields input").input_value() == "age"
    page.select_option("#constraint", "regex")
    assert page.input_value("#source") == "[a-z ]+"


def test_a_property_is_added_to_the_schema_that_is_there(tab: Tab, script: Script) -> None:
    page = tab.page
    pasted: dict[str, Any] = {
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "in full", "minLength": 2},
            "home": {"$ref": "#/$defs/place"},
        },
        "required": ["name"],
        "$defs": {"place": {"type": "object"}},
    }
    page.click("#form-of-answer summary")
    page.fill("#source", json.dumps(pasted))
    page.click("#field")
    page.locator("#fields input").last.fill("age")
    page.locator("#fields select").last.select_option("integer")

    def text() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(page.input_value("#source"))
        return found

    wanted = json.loads(json.dumps(pasted))
    wanted["properties"]["age"] = {"type": "integer"}
    wanted["required"] = ["name", "age"]
    assert text() == wanted
    # The rows are the text's properties, which can be renamed and removed.
    names = page.locator("#fields input")
    assert [one.input_value() for one in names.all()] == ["name", "home", "age"]
    names.nth(1).fill("address")
    page.locator("#fields button").nth(2).click()
    wanted["properties"] = {
        "name": pasted["properties"]["name"],
        "address": pasted["properties"]["home"],
    }
    wanted["required"] = ["name"]
    assert text() == wanted and list(text()["properties"]) == ["name", "address"]
    # A used name does not change the property that has it. Enter moves to the next row.
    names.nth(1).press("Enter")
    assert page.evaluate("sent") == []
    names.nth(2).fill("name")
    assert text() == wanted
    assert page.locator("#fields input:invalid").count() == 1
    # Text that is no schema of an object stays, and the page says why.
    for other in ('{"type": "arr', '{"type": "array"}'):
        page.fill("#source", other)
        page.click("#field")
        page.locator("#wrong", has_text="The schema:").wait_for()
        assert page.input_value("#source") == other
    # The text of another kind of constraint is not read as a schema, and stays.
    page.select_option("#constraint", "regex")
    page.fill("#source", "[0-9]+")
    page.click("#field")
    assert page.input_value("#source") == '{"type": "array"}'
    page.select_option("#constraint", "regex")
    assert page.input_value("#source") == "[0-9]+"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("#tools", "[{", "Tools: "),
        ("#temperature", "7", "Temperature: "),
        ("#prompt", "", "The prompt is empty."),
    ],
)
def test_an_error_stays_until_something_is_done(
    tab: Tab, script: Script, field: str, value: str, says: str
) -> None:
    page = tab.page
    page.locator("details", has=page.locator("#tools")).locator("summary").click()
    page.fill(field, value)
    page.click("#send")
    for _ in range(2):  # the first status may be older
        with page.expect_response("**/get_server_info"):
            pass
    assert page.locator("#wrong").inner_text().startswith(says)
    assert page.evaluate("document.activeElement.id") == field[1:]
    assert page.evaluate("sent") == [] and page.locator(".turn").count() == 0
    page.keyboard.type("1")
    assert page.locator("#wrong").is_hidden()


def test_fields_left_empty_are_left_to_the_server(tab: Tab, script: Script) -> None:
    page = tab.page
    for number in ("#temperature", "#top_p", "#max_tokens", "#seed"):
        page.fill(number, "")
    script.ask("Hello!")
    (sent,) = page.evaluate("sent")
    assert not {"temperature", "top_p", "max_tokens", "seed"} & set(sent)


def test_fields_left_empty_are_sampled_as_the_model_recommends(tab: Tab) -> None:
    page = tab.page
    own = {"id": "own", "parent": None, "default_sampling": {"temperature": 0.6, "top_p": 0.95}}
    none = {"id": "none", "parent": None, "default_sampling": {}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [none, own]}))
    page.route(
        re.compile("[?&]model="), lambda route: route.fulfill(json={"status": {}, "findings": []})
    )
    page.reload()
    page.locator("#model:enabled").wait_for()
    assert page.input_value("#temperature") == "0.7"  # this model recommends nothing
    page.select_option("#model", "own")
    assert page.input_value("#temperature") == page.input_value("#top_p") == ""
    assert page.locator("#temperature").get_attribute("placeholder") == "0.6"
    assert page.locator("#top_p").get_attribute("placeholder") == "0.95"
    page.select_option("#model", "none")
    assert page.input_value("#temperature") == "0.7"
    page.fill("#temperature", "0.2")  # a value that the user typed stays
    page.select_option("#model", "own")
    assert page.input_value("#temperature") == "0.2"


def test_the_key_is_asked_for_once(tab: Tab) -> None:
    page = tab.page

    late: list[playwright.Route] | None = None

    def guard(route: playwright.Route) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        elif late is not None:
            late.append(route)
        else:
            route.fulfill(status=401, json={"error": {"message": "no"}})

    page.route(re.compile("v1/|get_server_info|metrics|cache/"), guard)
    page.locator("#key-dialog").wait_for()
    page.keyboard.type("half a ke")
    page.keyboard.press("Escape")
    for _ in range(2):
        with page.expect_response("**/get_server_info"):
            pass
    assert page.locator("#key-dialog").is_hidden()
    assert page.locator("#state").inner_text() == "An API key is needed."
    page.click("#ask-key")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.locator("#state", has_text="wrong").wait_for()
    page.locator("#key-dialog").wait_for()
    late = []  # The server refuses a request with the wrong key after the right one arrives.
    for _ in range(PATIENCE_MS // 20):
        if late:
            break
        page.wait_for_timeout(20)
    page.fill("#key", "right")
    page.keyboard.press("Enter")
    for route in late:
        route.fulfill(status=401, json={"error": {"message": "no"}})
    page.locator("#state:empty").wait_for(state="attached")
    assert page.locator("#ask-key").is_hidden() and page.locator("#key-dialog").is_hidden()
    tab.console.clear()  # browsers report every reply that is an error


def test_copying_works_over_plain_http_from_another_host(
    browser: playwright.Browser, url: str
) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    host = "http://rootlace.test"

    def forward(route: playwright.Route) -> None:
        own = route.request.url.replace(host, url, 1)
        route.fulfill(response=route.fetch(url=own, headers={"accept": "*/*"}))

    page.route(f"{host}/**", forward)
    page.goto(host)
    page.locator("#model", has_text="demo").wait_for()
    assert page.evaluate("!isSecureContext && navigator.clipboard === undefined")
    page.fill("#prompt", "It's a copy.")
    click_copy(page, "as-curl")
    page.click("#as-curl")  # a second click must not keep "Copied" as the label
    page.locator("#as-curl", has_text="Copy as curl").wait_for()
    page.locator("#system").focus()
    page.keyboard.press("Control+V")
    pasted = page.input_value("#system")
    assert pasted.startswith(f"curl {host}/v1/chat/completions") and "'\\''s a copy." in pasted
    # If the older way is refused, too, the text is selected for copying by hand.
    page.evaluate("document.execCommand = () => false")
    page.fill("#system", "")
    page.click("#as-python")
    page.locator("#copy-dialog").wait_for()
    assert page.evaluate("getSelection().toString()").startswith("from openai import OpenAI")
    page.close()


def test_results_of_tools_are_entered(tab: Tab, script: Script) -> None:
    page = tab.page
    script.ask("Is it warmer in Oslo or in Rome?")
    script.call(("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}'))
    script.end()
    results = page.locator(".result textarea")
    results.nth(0).fill("4 degrees")
    page.click("text=Send the results")
    page.locator("#wrong", has_text="result of weather is missing").wait_for()
    assert page.evaluate("sent.length") == 1
    page.keyboard.type("21 degrees")  # the missing field has the focus
    page.reload()
    page.locator("#model", has_text="demo").wait_for()
    page.evaluate(SCRIPTED)
    page.click("text=Send the results")
    script.say("In Rome.")
    script.end()
    question, answer, *given = script.messages()
    assert question == user("Is it warmer in Oslo or in Rome?")
    assert [call["id"] for call in answer["tool_calls"]] == ["call-0", "call-1"]
    assert given == [
        {"role": "tool", "tool_call_id": "call-0", "content": "4 degrees"},
        {"role": "tool", "tool_call_id": "call-1", "content": "21 degrees"},
    ]
    # A call that was cut off has no result; the words before it stay.
    script.ask("And in Bergen?")
    script.say("I look.")
    script.call(("weather", '{"city": "Ber'))
    page.click("#stop")
    page.locator(".facts", has_text="call of weather was cut off").wait_for()
    script.ask("Well?")
    assert script.messages()[-2:] == [model("I look."), user("Well?")]


def test_a_result_reaches_the_model(tab: Tab) -> None:
    page = tab.page
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "40")
    page.locator("details", has=page.locator("#tools")).locator("summary").click()
    page.fill("#tools", json.dumps([TOOL]))
    page.select_option("#tool_choice", "required")
    page.fill("#prompt", "Hello!")  # no model calls a tool for this by itself
    page.click("#send")
    page.locator(".result textarea").fill("sunny")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Control+Enter")
    assert asked.value.post_data_json["messages"][-1]["content"] == "sunny"
    assert "tool_choice" not in asked.value.post_data_json
    tab.answer(1)
    assert page.locator(".bad:visible").count() == 0


def test_only_the_playground_sends(tab: Tab, script: Script) -> None:
    page = tab.page
    page.keyboard.press("Escape")
    page.click("#tab-play")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tree").is_visible()
    page.keyboard.press("Control+Enter")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#play").is_visible()
    assert page.evaluate("sent") == []


def test_charts_have_values_and_times(tab: Tab) -> None:
    """A line's places agree with the values on the axes."""
    page = tab.page
    page.click("#tab-load")
    noon = 1_700_000_000 - 1_700_000_000 % 60
    page.evaluate(
        """async (noon) => {
          const { Chart } = await import("/page/load.js");
          window.chart = new Chart({ name: "Made up" });
          document.getElementById("charts").append(chart.figure);
          const at = (second, value) => ({ now: noon + second, values: [value, null] });
          chart.draw([at(0, 0), at(15, 30), at(16, null), at(30, 40), at(60, 20), at(61, 20)]);
        }""",
        noon,
    )
    figure = page.locator("figure").last
    values = figure.locator("text.value")
    assert values.all_text_contents() == ["0", "10", "20", "30", "40"]
    height = {one.text_content(): float(one.get_attribute("y") or 0) - 4 for one in values.all()}
    times = figure.locator("text.time")
    clock = page.evaluate(
        "(s) => new Date(s * 1000).toLocaleTimeString([], { hourCycle: 'h23' })", noon + 30
    )
    place = {one.text_content(): float(one.get_attribute("x") or 0) for one in times.all()}
    path = figure.locator("path.line").first.get_attribute("d") or ""
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    read = [next(v for v, h in height.items() if abs(h - y) < 0.2) for _, y in points]
    assert read == ["0", "30", "40", "20", "20"]
    assert abs(points[2][0] - place[clock]) < 0.2
    # Long gaps in the measurements interrupt the line; a lone value is a mark.
    assert [len(run.split("L")) for run in path.split("M")[1:]] == [1, 1, 1, 2]
    light = values.first.evaluate("(text) => getComputedStyle(text).fill")
    page.keyboard.press("t")
    assert values.first.evaluate("(text) => getComputedStyle(text).fill") != light
    page.keyboard.press("t")
    figure.locator("svg").hover(position={"x": points[2][0], "y": 40})
    assert figure.locator("b").inner_text() == f"40 / – at {clock}"
    # On a phone, labels of times neither overlap nor leave the chart.
    page.mouse.move(0, 0)
    page.set_viewport_size({"width": 360, "height": 740})
    page.evaluate("chart.draw(chart.samples)")
    # A new text of an SVG may have no box until the page is painted (Chromium 150).
    page.evaluate("new Promise((told) => requestAnimationFrame(() => setTimeout(told)))")
    boxes = times.evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().toJSON())")
    frame = figure.bounding_box()
    assert frame and len(boxes) >= 2
    edge = frame["x"]
    for box in boxes:
        assert box["x"] > edge
        edge = box["x"] + box["width"]
    assert edge < frame["x"] + frame["width"]


def test_a_server_that_comes_back_is_asked_what_it_serves(tab: Tab) -> None:
    page = tab.page
    page.route("**/get_server_info", lambda route: route.abort())
    page.locator("#state", has_text="the server does not answer").wait_for()
    page.route(
        "**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "next", "parent": None}]})
    )
    page.unroute("**/get_server_info")
    page.locator("#model", has_text="next").wait_for()
    page.locator("#state:empty").wait_for(state="attached")
    page.fill("#prompt", "Hello!")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#send")
    assert asked.value.post_data_json["model"] == "next"
    page.locator(".turn.left .bad", has_text="next").wait_for()  # no such model exists
    tab.console.clear()  # browsers report every reply that is an error


def test_the_api_is_one_click_away(tab: Tab) -> None:
    tab.page.get_by_role("link", name="API").click()
    tab.page.locator("h1", has_text="served by Rootlace").wait_for()
    tab.page.get_by_role("link", name="the playground").click()
    tab.page.locator("#model", has_text="demo").wait_for()
