"""The five workloads as programs of the DSL, as a user would write them.

No program waits in the middle: a whole conversation or search is sent at once, and shared text is
appended once. Each generation has its request's name, so that both ways to drive the runtime can be
compared token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import rootlace as rl
from benchmarks.peers.drive import Driven
from benchmarks.peers.workloads import Node, Tokens, Workload

Found = tuple[str, rl.ProgramState, str]
"""Request's name, the state that holds its generation, the variable's name."""
Run = Callable[[rl.Function, list[Any]], list[Any]]


@rl.function
def ask_all(s: Any, text: Tokens, questions: list[Node]) -> Any:
    """Ask many questions about one text, or behind the same examples."""
    s += rl.ids(text)
    answers = s.fork(len(questions))
    answers += [rl.ids(question.tokens) + rl.gen("answer") for question in questions]
    return answers


@rl.function
def chat(s: Any, system: Tokens, turns: list[Node]) -> None:
    s += rl.ids(system)
    for number, turn in enumerate(turns):
        s += rl.ids(turn.tokens) + rl.gen(f"reply {number}")


@rl.function
def tree_search(s: Any, problem: Tokens, thoughts: list[Node]) -> Any:
    s += rl.ids(problem)
    first = s.fork(len(thoughts))
    first += [rl.ids(thought.tokens) + rl.gen("thought") for thought in thoughts]
    second = [branch.fork(len(thoughts[i].below)) for i, branch in enumerate(first)]
    for thought, branches in zip(thoughts, second, strict=True):
        branches += [rl.ids(last.tokens) + rl.gen("next") for last in thought.below]
    return first, second


@rl.function
def complete(s: Any, prompt: Tokens) -> None:
    s += rl.ids(prompt) + rl.gen("text")


def _texts(work: Workload, run: Run) -> Iterator[Found]:
    states = run(ask_all, [(root.tokens, root.below) for root in work.roots])
    for root, state in zip(work.roots, states, strict=True):
        for question, answer in zip(root.below, state.ret_value, strict=True):
            yield question.name, answer, "answer"


def _chats(work: Workload, run: Run) -> Iterator[Found]:
    (system,) = work.roots
    talks = []
    for node in system.below:
        turns = [node]
        while turns[-1].below:
            turns += turns[-1].below
        talks.append(turns)
    states = run(chat, [(system.tokens, turns) for turns in talks])
    for turns, state in zip(talks, states, strict=True):
        yield from ((turn.name, state, f"reply {n}") for n, turn in enumerate(turns))


def _searches(work: Workload, run: Run) -> Iterator[Found]:
    states = run(tree_search, [(root.tokens, root.below) for root in work.roots])
    for root, state in zip(work.roots, states, strict=True):
        for thought, branch, lasts in zip(root.below, *state.ret_value, strict=True):
            yield thought.name, branch, "thought"
            for node, last in zip(thought.below, lasts, strict=True):
                yield node.name, last, "next"


def _prompts(work: Workload, run: Run) -> Iterator[Found]:
    states = run(complete, [(root.tokens,) for root in work.roots])
    for root, state in zip(work.roots, states, strict=True):
        yield root.name, state, "text"


_PROGRAMS = {"W1": _texts, "W2": _chats, "W3": _searches, "W4": _prompts, "W5": _texts}


def drive_programs(backend: Any, workload: Workload) -> Driven:
    """Run the workload as programs.

    The time ends when every result has been read. Times to the first token are the runtime's
    (`time_to_first_token`), since programs that do not stream have no others.
    """
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    options["max_tokens"] = workload.wanted

    def run(program: rl.Function, batch: list[Any]) -> list[Any]:
        states: list[Any] = program.run_batch(batch, backend=backend, **options)
        return states

    start = time.perf_counter()
    metas = {
        name: state.get_meta_info(variable)
        for name, state, variable in _PROGRAMS[workload.name](workload, run)
    }
    wall = time.perf_counter() - start
    return Driven(
        wall=wall,
        ttft=[meta["time_to_first_token"] for meta in metas.values()],
        prompt_tokens=sum(meta["prompt_tokens"] for meta in metas.values()),
        outputs={name: list(meta["output_ids"]) for name, meta in metas.items()},
        cached=sum(meta["cached_tokens"] for meta in metas.values()),
    )
