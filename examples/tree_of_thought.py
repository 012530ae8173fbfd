"""Tree of thought: propose several steps, rate each, keep the best, go on from there.

    python examples/tree_of_thought.py [--model PATH | --url URL]

Each level asks one question of a chain. Its branches sample answers side by side; a fork of each
branch has the model itself rate the answer; the best branches grow on. All of it hangs on one
trunk, which is computed once.
"""

from __future__ import annotations

from operator import itemgetter

import rootlace as rl
from backend import arguments, backend

PASSAGE = "Ida Lund is 47 years old. Ida Lund lives in Bergfeld. She works as a pilot."
QUESTIONS = ["Where does Ida Lund live?", "How old is Ida Lund?"]
WIDTH, KEEP = 4, 2

Path = tuple[float, list[str], rl.ProgramState]
"""How good it looks, the answers so far, and the branch they stand in."""


def rate(branch: rl.ProgramState) -> rl.ProgramState:
    """Ask the model about the branch's last answer, in a fork of its own; nothing waits."""
    (judge,) = branch.fork(1)
    judge += rl.user(f"Does the text mention {branch['answer']}?")
    judge += rl.assistant(rl.select("verdict", ["yes", "no"]))
    return judge


def confidence(judge: rl.ProgramState) -> float:
    yes, no = judge.get_meta_info("verdict")["scores"]
    return float(yes - no)


@rl.function
def search(s: rl.ProgramState, passage: str, questions: list[str]) -> list[str]:
    """The answers along the best path."""
    s += rl.user(f"{passage}\n\n{questions[0]}")
    beam: list[Path] = [(0.0, [], s)]
    for level, question in enumerate(questions):
        grown: list[Path] = []
        for score, answers, state in beam:
            forks = state.fork(WIDTH)
            if level:
                forks += rl.user(question)
            # Each branch has a seed of its own, so the search is wide, and the same every time.
            forks += [
                rl.assistant(rl.gen("answer", max_tokens=16, temperature=0.5, seed=seed))
                for seed in range(WIDTH)
            ]
            grown += [(score, answers, fork) for fork in forks]
        judges = [rate(fork) for _, _, fork in grown]
        rated = [
            (score + confidence(judge), [*answers, fork["answer"]], fork)
            for (score, answers, fork), judge in zip(grown, judges, strict=True)
        ]
        beam = sorted(rated, key=itemgetter(0), reverse=True)[:KEEP]
        for score, answers, _ in beam:
            print(f"level {level + 1}, {score:6.2f}: {' / '.join(answers)}")
    return beam[0][1]


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        best = search.run(PASSAGE, QUESTIONS).ret_value
    for question, answer in zip(QUESTIONS, best, strict=True):
        print(f"{question} {answer}")


if __name__ == "__main__":
    main()
