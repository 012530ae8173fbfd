"""Every program in examples/ runs as its first lines say, and its answers are right.

The tests use the real model, if present; the embedded model runs the examples that it can. Answers
are compared with the truth, not with a text: another machine may word them differently.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rootlace as rl
from rootlace.kernels.native.build import user_cache
from tests.real_model import needs_smollm2

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(
    path.stem for path in EXAMPLES.glob("*.py") if path.stem not in {"__init__", "backend"}
)


def run(name: str, *arguments: str, typed: str = "") -> str:
    """Return standard output of an example, which must succeed without a warning."""
    out, complaints = io.StringIO(), io.StringIO()
    path = EXAMPLES / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [str(path), *arguments])
        patch.setattr("sys.stdin", io.StringIO(typed))
        patch.syspath_prepend(str(EXAMPLES))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(complaints):
            runpy.run_path(str(path), run_name="__main__")
    rl.set_default_backend(None)
    assert not complaints.getvalue()
    return out.getvalue()


def run_alone(name: str, *arguments: str, **environment: str) -> tuple[str, str]:
    """Run an example in its own process; return its output and its warnings."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        text=True,
        capture_output=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(params=["embedded", "smollm2"])
def either(request: pytest.FixtureRequest) -> rl.Runtime:
    """The embedded model, and the real one if present."""
    started: rl.Runtime = request.getfixturevalue(
        "runtime" if request.param == "embedded" else "smollm2"
    )
    return started


def test_there_is_a_test_and_a_picture_of_each() -> None:
    tested = set(re.findall(r'run(?:_alone)?\("(\w+)"', Path(__file__).read_text()))
    assert tested == set(PROGRAMS)
    gallery = (EXAMPLES.parent / "docs" / "gallery.md").read_text()
    assert set(re.findall(r"screens/gallery/(\w+)\.png", gallery)) == tested


@pytest.mark.parametrize("name", PROGRAMS)
def test_short_and_explained(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 110
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring and f"python examples/{name}.py" in docstring


def check_quickstart(output: str) -> None:
    """Check all that `make demo` prints."""
    answers = dict(re.findall(r"^  ([^:?\n]+[:?]) (.+)$", output, re.M))
    assert {text: answers[f"{text}:"] for text in LABELS} == LABELS
    assert re.findall(r"^  (Person\(.*)$", output, re.M) == [
        f"Person(name={name!r}, age={age}, city={city!r})" for name, age, city in PEOPLE
    ]
    assert "62" in answers["How old is Maria Costa?"]
    assert "Lisbon" in answers["Where does Maria Costa live?"]
    assert re.search("judge|Maria Costa", answers["Who is Maria Costa?"])
    rows = re.findall(r"^ *(triage \d|extract \d|ask, fork \d) +(\d[\d ]*)", output, re.M)
    assert len(rows) == 3 + 3 + 3
    numbers = {name: tuple(map(int, row.split())) for name, row in rows}
    for prompt, cached, computed, _ in numbers.values():
        assert prompt == cached + computed
    # The examples were computed for the first message only, and the text for the first question.
    for name in ("triage 2", "triage 3", "ask, fork 2", "ask, fork 3"):
        assert numbers[name][1] > numbers[name][2]


LABELS = {
    "where is my parcel": "delivery",
    "please return my money": "money",
    "my credit card was charged by mistake": "money",
}
PEOPLE = [("Ida Lund", 47, "Bergfeld"), ("Karl Brandt", 31, "Norwick"), ("Tom Lee", 25, "Ulm")]


@needs_smollm2
def test_quickstart_runs_on_the_real_model() -> None:
    output, complaints = run_alone("quickstart")
    assert "Model: smollm2" in output
    assert not complaints
    check_quickstart(output)


def test_quickstart_without_the_real_model(demo_model: Path, tmp_path: Path) -> None:
    """Without package index or file the embedded model runs, and the output says so."""
    cache = tmp_path / "rootlace"
    cache.mkdir()
    for kept in user_cache().iterdir():  # compiled kernels
        if kept.name != "models":
            (cache / kept.name).symlink_to(kept)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    output, complaints = run_alone("quickstart", XDG_CACHE_HOME=str(tmp_path), **nowhere)
    assert "smollm2: " in complaints  # why
    assert "The embedded model runs instead" in complaints
    assert "Model: demo" in output
    check_quickstart(output)


def test_a_model_that_is_named_has_no_stand_in() -> None:
    with pytest.raises(rl.RootlaceError):
        run("quickstart", "--model", "/no/such/model")


def test_chat(smollm2: rl.Runtime) -> None:
    typed = "What is the capital of Japan?\nAnd the capital of France?\n\n"
    output = run("chat", "--url", smollm2.program_address, typed=typed)
    first, second, _ = output.split("you: ")[1:]
    assert "Tokyo" in first and "Paris" in second
    _, (cached, prompt) = re.findall(r"\((\d+) of (\d+) prompt tokens cached\)", output)
    # All but the second question is cached.
    assert int(cached) > int(prompt) // 2


def test_a_chat_remembers(smollm2: rl.Runtime, tmp_path: Path) -> None:
    asked = ("chat", "--url", smollm2.program_address, "--memory", str(tmp_path / "chat.json"))
    run(*asked, typed="What is the capital of Japan?\n\n")
    assert "Paris" in run(*asked, typed="And of France?\n\n")


def test_a_chat_remembers_a_name(runtime: rl.Runtime, tmp_path: Path) -> None:
    asked = ("chat", "--url", runtime.program_address, "--memory", str(tmp_path / "chat.json"))
    run(*asked, typed="Hello, my name is Anna.\n\n")
    assert "Your name is Anna." in run(*asked, typed="What is my name?\n\n")


def test_json_service(either: rl.Runtime) -> None:
    assert run("json_service", "--url", either.program_address).splitlines() == [
        f"{age}: {name} of {city}" for name, age, city in reversed(PEOPLE)
    ]


def test_json_extraction(either: rl.Runtime) -> None:
    *people, last = run("json_extraction", "--url", either.program_address).splitlines()
    assert people == [f"{name} of {city} will be {age + 1}" for name, age, city in reversed(PEOPLE)]
    forced, tokens = map(int, re.findall(r"^(\d+) of (\d+) tokens", last)[0])
    assert 0 < forced < tokens


def test_few_shot_eval(either: rl.Runtime) -> None:
    *rows, last = run("few_shot_eval", "--url", either.program_address).splitlines()
    accuracy, count, cached = re.findall(r"(\d+)% of (\d+) right, (\d+)% of the prompt", last)[0]
    assert int(accuracy) >= 80
    assert int(count) == len(rows) == 10
    assert int(cached) >= 80


def test_judge(either: rl.Runtime) -> None:
    lines = run("judge", "--url", either.program_address).splitlines()
    signs = {line.partition(":")[0]: re.findall(r"(\w+) ([+-])\d", line) for line in lines[:2]}
    assert signs == {
        "Sea View": [("room", "+"), ("staff", "+"), ("food", "-")],
        "Old Mill": [("room", "-"), ("staff", "-"), ("food", "+")],
    }
    assert lines[2] == "better: Sea View"


def test_rag(smollm2: rl.Runtime) -> None:
    output = run("rag", "--url", smollm2.program_address)
    answers = re.findall(r"-> (.+) \[(.+)\]   \(of (\d) found", output)
    assert [(said, source) for said, source, _ in answers] == [
        ("31", "Karl Brandt"),
        ("Norwick", "Karl Brandt"),
        ("62", "Maria Costa"),
        ("pilot", "Ida Lund"),
    ]
    assert max(int(found) for *_, found in answers) > 1  # several sources matched
    unknown, known = "Wozu?", "How old is Karl Brandt?"
    lines = run("rag", "--url", smollm2.program_address, unknown, known, "?").splitlines()
    assert lines[:2] == [f"{asked} -> no document has a word of it" for asked in (unknown, "?")]
    assert lines[2].startswith(f"{known} -> 31 [Karl Brandt]")


def test_tool_agent(smollm2: rl.Runtime) -> None:
    lines = run("tool_agent", "--url", smollm2.program_address).splitlines()
    assert [re.findall(r"\d+", line.partition(" -> ")[2])[0] for line in lines] == [
        *(str(result) for result in (37 * 12, 14 * 23, 15 + 28, 120 // 5)),
    ]


def test_what_the_tool_agent_says_of_the_model(smollm2: rl.Runtime) -> None:
    @rl.function
    def ask(s: rl.ProgramState) -> None:
        s += rl.user("What is 37 times 12?")
        s += rl.assistant(rl.gen("answer", max_tokens=60, temperature=0))

    assert "444" not in ask.run(backend=smollm2)["answer"]


def test_self_consistency(smollm2: rl.Runtime) -> None:
    *votes, answer = run("self_consistency", "--url", smollm2.program_address).splitlines()
    assert answer == "capital of Norway -> Oslo"
    # Single answers are sometimes wrong, which is why there is a vote.
    assert len(votes) // 2 <= votes.count("Oslo") < len(votes) == 12


def test_skeleton_of_thought(smollm2: rl.Runtime) -> None:
    *points, times = run("skeleton_of_thought", "--url", smollm2.program_address).splitlines()
    assert len(points) == len({point.partition(". ")[0] for point in points}) == 3
    for point, _, sentence in (line.partition(". ") for line in points):
        assert re.fullmatch(r"[A-Z][^.]{20,140}\.", sentence)
        # The sentence is about its own point.
        stems = {word[:5] for word in re.findall(r"\w{4,}", point.lower())}
        assert any(stem in sentence.lower() for stem in stems), (point, sentence)
    assert re.fullmatch(r"[\d.]+ s of writing in [\d.]+ s", times)


def test_tree_of_thought(smollm2: rl.Runtime) -> None:
    *rows, best = run("tree_of_thought", "--url", smollm2.program_address).splitlines()
    found = [re.findall(r"level (\d), +(-?[\d.]+): (.*)", row)[0] for row in rows]
    for level, count in (("1", 4), ("2", 8)):
        scores = [float(score) for at, score, _ in found if at == level]
        assert len(scores) == count
        assert scores == sorted(scores, reverse=True)
        assert scores[0] > 2  # clearly kind
    assert best == f"Our review of the hotel: We arrived on Friday evening. {found[4][2]}"
    # The paths that continued are the two kindest.
    kept = [text for _, _, text in found[:2]]
    assert all(text.startswith(tuple(kept)) for _, _, text in found[4:])
    # Seeds make the search the same every time, whatever is cached.
    assert run("tree_of_thought", "--url", smollm2.program_address).endswith(f"{best}\n")
