"""Draws the page of a server with the model smollm2: docs/screens/*.png.

python scripts/screenshots.py     (needs playwright, Debian's chromium and that model)
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

import rootlace as rl

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "screens"
WIDE: ViewportSize = {"width": 1180, "height": 760}
PHONE: ViewportSize = {"width": 390, "height": 780}
REVIEWS = ("A warm film.", "It never ends.", "The light was beautiful.", "Two hours lost.")


@rl.function
def review(s: rl.ProgramState, text: str) -> None:
    s += "Say whether a review is good or bad.\n"
    s += "Review: I laughed all the way through.\nLabel: good\n"
    s += "Review: The plot makes no sense.\nLabel: bad\n"
    s += f"Review: {text}\nLabel:" + rl.gen("label", max_tokens=3, temperature=0)


@rl.function
def tale(s: rl.ProgramState, name: str, width: int) -> None:
    s += f"Once upon a time {name} found a door in the old garden wall."
    forks = s.fork(width)
    forks += lambda i: f" Behind it, number {i}," + rl.gen("next", max_tokens=40, temperature=0.5)
    forks.join()


def stamped(runtime: rl.Runtime) -> None:
    """Return prompts with a time before their common text, which the lint reports."""
    rules = " ".join(f"Rule {n}: answer politely and in {n + 2} words at most." for n in range(40))
    for minute in range(10, 20):
        log = rl.function(
            lambda s, m=minute: s.append(
                f"It is 10:{m}. {rules}" + rl.gen("said", max_tokens=2, temperature=0)
            )
        )
        log.run(backend=runtime)


def load(runtime: rl.Runtime, stop: threading.Event) -> None:
    """Run programs until told to stop."""
    rounds = 0
    while not stop.is_set():
        review.run_batch([{"text": f"{text} ({rounds})"} for text in REVIEWS], backend=runtime)
        tale.run(name=("Lily", "Tom", "Ida")[rounds % 3], width=2 + rounds % 3, backend=runtime)
        rounds += 1


def ask(page: Page, prompt: str) -> None:
    before = page.locator(".facts", has_text="tokens/s").count()
    page.fill("#prompt", prompt)
    page.click("#send")
    page.locator(".facts", has_text="tokens/s").nth(before).wait_for()


def shoot(page: Page, name: str) -> None:
    page.wait_for_timeout(400)
    page.screenshot(path=FOLDER / f"{name}.png")
    print(FOLDER / f"{name}.png")


def draw(runtime: rl.Runtime, page: Page) -> None:
    page.set_default_timeout(120_000)
    page.goto(runtime.url or "")
    page.locator("#model", has_text="smollm2").wait_for()
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "60")
    page.click("#form-of-answer summary")
    for at, (name, kind) in enumerate((("name", "string"), ("age", "integer"))):
        page.click("#field")
        page.locator("#fields input").nth(at).fill(name)
        page.locator("#fields select").nth(at).select_option(kind)
    ask(page, "Extract name and age as JSON.\n\nIda Lund is 47 years old.")
    page.locator(".token").last.hover()
    shoot(page, "playground")
    stamped(runtime)
    stop = threading.Event()
    busy = threading.Thread(target=load, args=(runtime, stop))
    busy.start()
    page.click("#tab-tree")
    page.wait_for_timeout(8_000)
    page.locator("#canvas").focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    shoot(page, "cache")
    page.keyboard.press("3")
    page.wait_for_timeout(20_000)
    shoot(page, "load")
    page.keyboard.press("t")
    page.set_viewport_size(PHONE)
    page.keyboard.press("1")
    shoot(page, "phone")
    stop.set()
    busy.join()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with rl.Runtime("smollm2", http_port=0) as runtime, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        draw(runtime, browser.new_page(viewport=WIDE, color_scheme="light"))
        browser.close()


if __name__ == "__main__":
    main()
