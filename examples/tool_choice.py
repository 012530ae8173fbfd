"""Try every tool in a branch of its own, and go on with the call that the model finds likeliest.

    python examples/tool_choice.py [--model PATH | --url URL] ["a question" ...]

A fork costs nothing but what it adds. `tool_choice` makes each fork call another tool, with
arguments that fit it; `rl.best_of` keeps the fork whose call had the highest log-probability, and
the answer is written there, with the tool's result before it.
"""

from __future__ import annotations

import rootlace as rl
from backend import arguments, backend
from react_agent import TOOLS

QUESTIONS = ["What is 37 times 12?", "What is the mayor of Torvik?"]


@rl.function
def agent(s: rl.ProgramState, question: str) -> str:
    s += rl.system("You are a helpful assistant." + TOOLS) + rl.user(question)
    tools = iter(TOOLS)

    def call(fork: rl.ProgramState) -> None:
        choice = next(tools).name
        fork += rl.assistant(
            rl.gen(
                "call", tools=TOOLS, tool_choice=choice, max_tokens=60, temperature=0, logprobs=True
            )
        )
        (fork["tool"],) = fork.call_tools()

    def likelihood(fork: rl.ProgramState) -> float:
        return sum(token[0] for token in fork.get_meta_info("call")["output_token_logprobs"])

    rl.best_of(s, len(TOOLS), call, key=likelihood)
    s += rl.assistant(rl.gen("answer", max_tokens=60, temperature=0))
    return f"{s['answer']} [{s['tool'].name}]"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()
    with backend(given):
        for question in given.questions:
            print(f"{question} -> {agent.run(question).ret_value}")


if __name__ == "__main__":
    main()
