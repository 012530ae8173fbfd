"""Our backends for other services, used on our own server, which has those interfaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rootlace as rl

PASSAGE = "Ida Lund is 47 years old. She lives in Bergfeld."


@rl.function
def ask(s):
    s += rl.user(f"{PASSAGE}\n\nHow old is Ida Lund?")
    s += rl.assistant(rl.gen("age", max_tokens=12, temperature=0))
    s += rl.user("Where does Ida Lund live?")
    s += rl.assistant(rl.gen("city", max_tokens=12, temperature=0))


@rl.function
def extract(s):
    s += rl.user(f"Extract name and age as JSON.\n\n{PASSAGE}")
    s += rl.assistant(rl.gen("record", type=dict[str, str | int], max_tokens=40, temperature=0))


def litellm(url: str) -> Any:
    pytest.importorskip("litellm", reason="needs the extra `clients-all`")
    return rl.LiteLLMBackend("openai/demo", api_base=f"{url}/v1", api_key="none")


BACKENDS: list[Callable[[str], Any]] = [
    lambda url: rl.OpenAIBackend(f"{url}/v1"),
    lambda url: rl.AnthropicBackend("demo", url=url),
    litellm,
]


@pytest.mark.parametrize("make", BACKENDS, ids=["openai", "anthropic", "litellm"])
def test_the_same_answers_as_by_the_wire(
    url: str, runtime: rl.Runtime, make: Callable[[str], Any]
) -> None:
    backend = make(url)
    ours = ask.run(backend=runtime)
    theirs = ask.run(backend=backend)
    assert theirs.messages() == ours.messages() and "47" in theirs["age"]
    # Earlier text is found in the cache, and that interface reports it, too.
    meta = theirs.get_meta_info("city")
    assert 0 < meta["cached_tokens"] < meta["prompt_tokens"]
    streamed = ask.run(backend=backend, stream=True)
    assert "".join(streamed.text_iter("age")) == ours["age"]
    assert extract.run(backend=backend)["record"]
    with pytest.raises(rl.ProgramError):  # by the server, or by our own check
        look = rl.function(
            lambda s: s.append(rl.user(rl.image(b"GIF89a")) + rl.assistant(rl.gen("x")))
        )
        look.run(backend=backend)
    backend.close()
