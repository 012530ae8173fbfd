"""The page of a run in a headless Chromium, by keyboard and mouse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import rootlace as rl
from rootlace.timeline import Lane, Span, Stretch

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]
FORKS = 400


def timeline() -> rl.Timeline:
    """A trunk with many forks, each of which generates and calls a tool."""
    trunk = Span(
        kind="select", name="topic", asked=0.0, start=0.1, end=0.5, prompt_tokens=10, text="a",
        choices=("a", "b"), scores=(-0.5, -1.5), clock="server", admitted=0.2,
    )  # fmt: skip
    said = Span(
        kind="gen", name="tip", asked=0.5, start=0.5, admitted=0.55, first=0.6, end=1.0,
        before="<b>Tip</b>", text="Eat </script> well.", prompt_tokens=20, cached_tokens=15,
        completion_tokens=5, forced_tokens=2, clock="server",
        stretches=(Stretch(0.6, 0.8, 3, False), Stretch(0.8, 1.0, 2, True)),
    )  # fmt: skip
    called = Span(
        kind="tool", name="add", asked=1.0, start=1.0, end=1.25, state="failed", text="no"
    )
    forks = (Lane(str(at), 0, 0.5, 1.25, (said, called)) for at in range(FORKS))
    return rl.Timeline("tips", "demo", 1.25, (Lane("main", None, 0.0, 0.5, (trunk,)), *forks))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[playwright.Page]:
    """Open the file; the page may request no address, and its console must stay silent."""
    path = tmp_path_factory.mktemp("page") / "run.html"
    timeline().save(path)
    said: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1000, "height": 700}, color_scheme="light")
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(Path(path).as_uri())
        yield tab
        browser.close()
    assert not said and asked == [Path(path).as_uri()]


def labels(page: playwright.Page) -> list[tuple[str, float]]:
    """Return the times on the axis with their places."""
    found: list[tuple[str, float]] = page.evaluate(
        "() => { const said = []; const write = pen.fillText;"
        " pen.fillText = (text, x, y) => { if (y === AXIS / 2) said.push([text, x - 3]); };"
        " paint(); pen.fillText = write; return said; }"
    )
    return found


def until(page: playwright.Page, condition: str) -> None:
    """The page's own policy forbids playwright's way to wait."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"it never happened: {condition}")


def test_the_run_as_a_whole(page: playwright.Page) -> None:
    facts = page.locator("#facts").inner_text()
    assert "1.25 s" in facts and f"{FORKS + 1} branches" in facts
    assert "8,010 tokens, 75 % cached" in facts
    assert "2,000 tokens, 800 forced" in facts and f"tool calls {FORKS}" in facts
    page.locator("#all summary").click()
    until(page, f"document.querySelectorAll('#table tr').length === {2 * FORKS + 2}")


def test_by_keyboard(page: playwright.Page) -> None:
    detail = page.locator("#detail")
    page.locator("#canvas").focus()
    page.keyboard.press("Home")
    assert "select topic on main" in detail.inner_text()
    assert "0.40 s, from 0.10 s on" in detail.inner_text() and "-1.500" in detail.inner_text()
    page.keyboard.press("ArrowDown")
    told = detail.inner_text()
    assert "gen tip on 0" in told and "15 of 20 prompt tokens cached (75 %)" in told
    assert "first token after 0.10 s" in told and "5 tokens written, 2 of them forced" in told
    assert "<b>Tip</b>" in told and "Eat </script> well." in told  # texts, never markup
    page.keyboard.press("End")
    assert f"tool add on {FORKS - 1}" in detail.inner_text() and "failed" in detail.inner_text()
    page.keyboard.press("Escape")
    assert "Choose a bar" in detail.inner_text()


def test_the_axis_tells_times_apart(page: playwright.Page) -> None:
    page.evaluate("all()")
    assert [text for text, _ in labels(page)][:3] == ["0 s", "0.2 s", "0.4 s"]
    page.evaluate("zoom(1e-9, 0.75)")  # the closest zoom
    close = labels(page)
    assert len(close) > 3 and len({text for text, _ in close}) == len(close)
    for text, place in close:
        assert page.evaluate(f"x({float(text.removesuffix(' ms')) / 1000})") == pytest.approx(
            place, abs=0.5
        )
    page.evaluate("all()")
    # A run of hours, by the same functions.
    assert page.evaluate("[label(90, 30), label(7200, 1800), time(3723.4)]") == [
        *("1:30 min", "120:00 min"),
        "62 min 3 s",
    ]


def test_texts_are_copied(page: playwright.Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#canvas").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    gave = page.locator("#detail .dim", has_text="gave").locator("button")
    gave.click()
    page.locator("#detail button", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "Eat </script> well."
    # Without a clipboard the older way copies; if it is refused, the user copies by hand.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.keyboard.press("Tab")
    before = page.locator("#detail .dim", has_text="before it").locator("button")
    before.click()
    page.locator("#detail button", has_text="Copied").first.wait_for()
    page.evaluate("document.execCommand = () => false")
    gave.click()
    page.locator("#detail button", has_text="press Ctrl+C").wait_for()
    assert page.evaluate("getSelection().toString()") == "Eat </script> well."
    page.evaluate("getSelection().empty()")


def test_by_mouse_in_the_dark(page: playwright.Page) -> None:
    page.keyboard.press("0")
    light = page.evaluate("colour('paper')")  # the canvas's colour
    page.keyboard.press("t")
    until(page, f"colour('paper') !== '{light}'")
    # The bar of the first fork, by the page's own scale.
    place = page.evaluate("() => [x(0.7), y(1) + 20]")
    page.locator("#canvas").click(position={"x": place[0], "y": place[1]})
    assert "gen tip on 0" in page.locator("#detail").inner_text()
    wide = page.evaluate("view.to - view.from")
    page.keyboard.press("+")
    assert page.evaluate("view.to - view.from") == pytest.approx(wide / 2)
    page.mouse.wheel(0, 340)
    until(page, "view.top >= 10")


def test_many_branches_cost_what_is_seen(page: playwright.Page) -> None:
    drawn = page.evaluate(
        "() => { let bars = 0; const fill = pen.fillRect;"
        " pen.fillRect = (...given) => { bars += 1; fill.apply(pen, given); };"
        " all(); paint(); delete pen.fillRect; return bars; }"
    )
    assert 0 < drawn < 20 * 12  # visible lanes, with bars and gutters of each
    page.set_viewport_size({"width": 360, "height": 700})
    until(page, "document.documentElement.scrollWidth <= 360")
