"""sglang's own frontend, and its kits for testing servers, from its published wheel.

Only kits that need no particular model run; the kits themselves assert their results.
"""

from __future__ import annotations

import importlib
import math
import unittest
from typing import Any

import httpx
import openai
import pytest

import rootlace as rl

sgl = pytest.importorskip("sglang", reason="needs sglang's wheel (`make clients`)")

KITS: list[tuple[str, str, tuple[str, ...]]] = [
    ("abort_timeout_kit", "AbortAllMixin", ("test_abort_all",)),
    ("pause_generation_kit", "PauseResumeInPlaceMixin", ("test_pause_resume_in_place",)),
    (
        "basic_api_contract_kit",
        "BasicAPIContractMixin",
        ("test_health_generate", "test_get_server_info", "test_openai_chat_completion"),
    ),
    ("json_mode_kit", "JSONModeMixin", ("test_json_mode_with_streaming",)),
    ("json_constrained_kit", "JSONConstrainedMixin", ("test_json_openai",)),
    ("regex_constrained_kit", "RegexConstrainedMixin", ("test_regex_generate_date",)),
    ("ebnf_constrained_kit", "EBNFConstrainedMixin", ("test_ebnf_generate_phone",)),
]
SCALE = {
    "abort_all_num_requests": 4,
    "abort_all_sleep": 0.5,
    # The kit pauses 1 s after sending its requests and fails if all have ended by then: these
    # take several times as long on a quick machine.
    "pause_num_requests": 8,
    "pause_max_new_tokens": 1500,
    "pause_duration": 0.5,
    "pause_ignore_eos": True,
}


class _Alive:
    """The server's process as kits expect it."""

    def poll(self) -> None:
        return None


@pytest.mark.parametrize("kit, mixin, names", KITS, ids=[kit for kit, _, _ in KITS])
def test_kits(url: str, kit: str, mixin: str, names: tuple[str, ...]) -> None:
    module = importlib.import_module(f"sglang.test.kits.{kit}")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        about = {"base_url": url, "process": _Alive(), "model": "demo", "client": client}
        about |= {"served_model_name": "demo"} | SCALE
        case = type(mixin, (getattr(module, mixin), unittest.TestCase), about)
        result = unittest.TestResult()
        try:
            unittest.TestSuite(case(name) for name in names).run(result)
        finally:  # a kit that fails may leave the server paused
            httpx.post(f"{url}/continue_generation", json={}, timeout=60).raise_for_status()
    assert result.testsRun == len(names)
    assert result.wasSuccessful(), [said for _, said in result.errors + result.failures]


@pytest.fixture
def endpoint(url: str) -> Any:
    return sgl.RuntimeEndpoint(url)


def test_programs(endpoint: Any, runtime: rl.Runtime) -> None:
    """A program gives the same texts and choice with sglang's frontend and with ours."""

    def program(s: Any, sg: Any) -> None:
        s += "Who are you? "
        s += sg.gen("free", max_tokens=8, temperature=0)
        s += sg.gen("cut", max_tokens=20, temperature=0, stop=[" ", "e"])
        s += sg.gen("ended", max_tokens=20, temperature=0, stop_regex="[aeiou]+[^a-z]")
        s += sg.gen("date", max_tokens=20, temperature=0, regex=r"20[0-9]{2}-(0[1-9]|1[0-2])")
        s += sg.select("choice", ["yes", "no", "not at all"])

    theirs = sgl.function(lambda s: program(s, sgl)).run(backend=endpoint)
    ours = rl.function(lambda s: program(s, rl)).run(backend=runtime)
    for name in ("free", "date", "choice"):
        assert theirs[name] == ours[name], name
    assert theirs.text() == ours.text()


def test_streams_and_forks(endpoint: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Count: "
        for fork in s.fork(2):
            fork += sgl.gen("part", max_tokens=4, temperature=0)
        s += sgl.gen("all", max_tokens=12, temperature=0, return_logprob=True)

    state = program.run(backend=endpoint, stream=True)
    pieces = list(state.text_iter("all"))
    assert "".join(pieces) == state["all"]
    meta = state.get_meta_info("all")
    assert meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert all(math.isfinite(score) for score, _, _ in meta["output_token_logprobs"])
