"""An agent that calls tools until it can answer.

    python examples/react_agent.py [--model PATH | --url URL] ["a question" ...]

`rl.tools` makes schemas of plain functions; what the model calls fits them, and `s.call_tools()`
runs it and appends what it gave. Each step only computes what is new: the conversation before it is
in the branch's KV already.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

import rootlace as rl
from backend import arguments, backend

FACTS = {
    "population of Torvik": "48210",
    "mayor of Torvik": "Ida Lund",
    "height of Mount Osk": "2207",
}
QUESTIONS = ["What is 37 times 12?", "What is the mayor of Torvik?"]
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise ValueError(f"cannot evaluate {ast.unparse(node)}")

    return f"{value(ast.parse(expression, mode='eval').body):.10g}"


def lookup(query: str) -> str:
    """Look up a fact."""
    return FACTS.get(query, "not found")


TOOLS = rl.tools(calculator, lookup)


@rl.function
def agent(s: rl.ProgramState, question: str, max_steps: int = 4) -> str:
    s += rl.system("You are a helpful assistant." + TOOLS) + rl.user(question)
    for _ in range(max_steps):
        s += rl.assistant(rl.gen("said", tools=TOOLS, max_tokens=80, temperature=0))
        if not s.call_tools():
            return s["said"]
    return "no answer"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()
    with backend(given):
        for question in given.questions:
            print(f"{question} -> {agent.run(question).ret_value}")


if __name__ == "__main__":
    main()
