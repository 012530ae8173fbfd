"""The five workloads as programs of the DSL: what a user would write.

Nothing waits in the middle: a whole conversation or search is sent at once, and what is shared is
said once. Each generation has the name of the request that it stands for, so that both ways to
drive the runtime can be compared token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import rootlace as rl
from benchmarks.peers.drive import Driven
from benchmarks.peers.workloads import (
    Chat,
    FewShot,
    LongDocuments,
    NothingShared,
    Thought,
    Tokens,
    TreeSearch,
)

Found = tuple[str, rl.ProgramState, str]
"""Request's name, the state that holds its generation, the variable's name."""


@rl.function
def ask_all(s: Any, text: Tokens, questions: list[Tokens]) -> Any:
    """Many questions about one text, or behind the same examples."""
    s += rl.ids(text)
    answers = s.fork(len(questions))
    answers += [rl.ids(question) + rl.gen("answer") for question in questions]
    return answers


@rl.function
def chat(s: Any, system: Tokens, turns: list[Tokens]) -> None:
    s += rl.ids(system)
    for number, turn in enumerate(turns):
        s += rl.ids(turn) + rl.gen(f"reply {number}")


@rl.function
def tree_search(s: Any, problem: Tokens, thoughts: list[Thought]) -> Any:
    s += rl.ids(problem)
    first = s.fork(len(thoughts))
    first += [rl.ids(thought.hint) + rl.gen("thought") for thought in thoughts]
    second = [branch.fork(len(thoughts[i].next)) for i, branch in enumerate(first)]
    for thought, branches in zip(thoughts, second, strict=True):
        branches += [rl.ids(hint) + rl.gen("next") for hint in thought.next]
    return first, second


@rl.function
def complete(s: Any, prompt: Tokens) -> None:
    s += rl.ids(prompt) + rl.gen("text")


def _few_shot(work: FewShot, run: Callable[..., list[Any]]) -> Iterator[Found]:
    (state,) = run(ask_all, [(work.examples, work.questions)])
    for number, answer in enumerate(state.ret_value):
        yield f"r{number}", answer, "answer"


def _chat(work: Chat, run: Callable[..., list[Any]]) -> Iterator[Found]:
    states = run(chat, [(work.system, talk) for talk in work.talks])
    for number, state in enumerate(states):
        for turn in range(work.TURNS):
            yield f"c{number}t{turn}", state, f"reply {turn}"


def _tree_search(work: TreeSearch, run: Callable[..., list[Any]]) -> Iterator[Found]:
    states = run(tree_search, list(zip(work.problems, work.thoughts, strict=True)))
    for number, state in enumerate(states):
        first, second = state.ret_value
        for branch, thought in enumerate(first):
            yield f"q{number}b{branch}", thought, "thought"
            for below, last in enumerate(second[branch]):
                yield f"q{number}b{branch}k{below}", last, "next"


def _nothing_shared(work: NothingShared, run: Callable[..., list[Any]]) -> Iterator[Found]:
    states = run(complete, [(prompt,) for prompt in work.prompts])
    for number, state in enumerate(states):
        yield f"r{number}", state, "text"


def _long_documents(work: LongDocuments, run: Callable[..., list[Any]]) -> Iterator[Found]:
    questions = [[asked[d] for asked in work.questions] for d in range(len(work.documents))]
    states = run(ask_all, list(zip(work.documents, questions, strict=True)))
    for document, state in enumerate(states):
        for question, answer in enumerate(state.ret_value):
            yield f"d{document}q{question}", answer, "answer"


_PROGRAMS: dict[str, Callable[..., Iterator[Found]]] = {
    "W1": _few_shot,
    "W2": _chat,
    "W3": _tree_search,
    "W4": _nothing_shared,
    "W5": _long_documents,
}


def drive_programs(backend: Any, workload: Any) -> Driven:
    """Run the workload as programs.

    The time ends when every result has been read. Times to the first token are those that the
    runtime tells (`time_to_first_token`): programs that do not stream have no other.
    """
    options = {"temperature": 0, "max_tokens": workload.WANTED, "ignore_eos": True}

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
