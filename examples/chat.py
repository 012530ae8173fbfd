"""A chat in the terminal. Every turn finds all earlier ones in the cache.

    python examples/chat.py [--model PATH | --url URL]

The program runs beside the terminal, as one long-lived branch: what was said is never sent or
tokenized again. An empty line ends it.
"""

from __future__ import annotations

import itertools
from queue import SimpleQueue

import rootlace as rl
from backend import arguments, backend


@rl.function
def chat(s: rl.ProgramState, questions: SimpleQueue[str]) -> None:
    for turn in itertools.count():
        question = questions.get()
        if not question:
            return
        s += rl.user(question)
        s += rl.assistant(rl.gen(f"reply {turn}", max_tokens=200, temperature=0))


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        questions: SimpleQueue[str] = SimpleQueue()
        state = chat.run(questions, stream=True)
        for turn in itertools.count():
            try:
                question = input("you: ").strip()
            except (EOFError, KeyboardInterrupt):
                question = ""
            questions.put(question)
            if not question:
                break
            print("model: ", end="")
            for text in state.text_iter(f"reply {turn}"):
                print(text, end="", flush=True)
            meta = state.get_meta_info(f"reply {turn}")
            print(f"   ({meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached)")
        print()


if __name__ == "__main__":
    main()
