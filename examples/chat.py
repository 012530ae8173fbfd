"""A terminal chat that remembers its turns, across restarts, too.

    python examples/chat.py [--model NAME | --url URL] [--memory FILE]

Each turn is a program that continues from the state of the previous turn, with the same token ids.
So the cache has the whole prefix. With --memory a JSON file keeps the state. An empty line ends the
chat.

SmolLM2-135M answers "What is the capital of Japan?" and then "And the capital of France?". The
model forgets facts about you, such as the name that you tell it.
"""

from __future__ import annotations

from pathlib import Path

import rootlace as rl
from backend import arguments, backend


@rl.function
def turn(s: rl.ProgramState, question: str) -> None:
    s += rl.user(question)
    s += rl.assistant(rl.gen("reply", max_tokens=200, temperature=0))


def ask(question: str, before: rl.ProgramState | None) -> rl.ProgramState:
    """Run one turn, shown while it is written."""
    state = turn.run(question, after=before, stream=True)
    print("model: ", end="")
    for text in state.text_iter("reply"):
        print(text, end="", flush=True)
    state.sync()
    meta = state.get_meta_info("reply")
    print(f"   ({meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached)")
    return state


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--memory", type=Path, metavar="FILE", help="go on from here, and keep it")
    given = parser.parse_args()
    state: rl.ProgramState | None = None
    if given.memory and given.memory.exists():
        state = rl.State.from_json(given.memory.read_text())
    with backend(given):
        while True:
            try:
                question = input("you: ").strip()
            except (EOFError, KeyboardInterrupt):
                question = ""
            if not question:
                break
            state = ask(question, state)
            if given.memory:
                given.memory.write_text(state.to_json())
        print()


if __name__ == "__main__":
    main()
