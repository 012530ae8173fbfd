"""Write a call of every tool side by side, and make the one that the model finds likeliest.

    python examples/tool_choice.py [--model PATH | --url URL] ["a question" ...]

`tool_choice` makes each fork call another tool, with arguments that fit it; a fork costs nothing
but what it adds. The call with the highest log-probability is made, and no other; the answer is
written behind its result, in the same fork.
"""

from __future__ import annotations

import rootlace as rl
from backend import arguments, backend
from react_agent import TOOLS

QUESTIONS = ["What is 37 times 12?", "What is the mayor of Torvik?"]


def likelihood(fork: rl.ProgramState) -> float:
    return sum(token[0] for token in fork.get_meta_info("call")["output_token_logprobs"])


@rl.function
def agent(s: rl.ProgramState, question: str) -> str:
    s += rl.system("You are a helpful assistant." + TOOLS) + rl.user(question)
    forks = s.fork(len(TOOLS))
    for fork, tool in zip(forks, TOOLS, strict=True):
        call = rl.gen("call", tools=TOOLS, tool_choice=tool.name, max_tokens=60, logprobs=True)
        fork += rl.assistant(call)

    best = max(forks, key=likelihood)
    (called,) = best.call_tools()
    best += rl.assistant(rl.gen("answer", max_tokens=60))
    return f"{best['answer']} [{called.name}]"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()
    with backend(given):
        for question in given.questions:
            print(f"{question} -> {agent.run(question, temperature=0).ret_value}")


if __name__ == "__main__":
    main()
