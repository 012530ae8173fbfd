"""An agent that calculates with a tool, and answers with the tool's result.

    python examples/tool_agent.py [--model NAME | --url URL] ["a question" ...]

`rl.tools` makes schemas of plain functions, and the model's calls fit them. `s.call_tools()` runs
the calls and appends their results. The examples show the form of calls and are computed once; each
step computes new tokens only.

SmolLM2-135M cannot calculate: without the tool it answers 372 for 37 times 12. The model
writes the calculation that a question asks for. The model cannot decide whether to call a tool,
or which one. So `tool_choice` demands a call, and there is one tool.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable

import rootlace as rl
from backend import arguments, backend

SHOTS = [
    ("What is 12 times 8?", "12 * 8", "96"),
    ("Anna has 45 stamps and buys 30 more. How many has she now?", "45 + 30", "75"),
    ("What is 90 minus 20?", "90 - 20", "70"),
]
QUESTIONS = [
    "What is 37 times 12?",
    "A ticket costs 14 euros. What do 23 tickets cost?",
    "Tom has 15 apples and buys 28 more. How many has he now?",
    "How much is 120 divided by 5?",
]
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


TOOLS = rl.tools(calculator)


def shown_call(expression: str) -> str:
    """Return a call in the form of most chat templates."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@rl.function
def agent(s: rl.ProgramState, question: str) -> str:
    s += rl.system("You are a helpful assistant." + TOOLS)
    for asked, expression, result in SHOTS:
        s += rl.user(asked) + rl.assistant(shown_call(expression)) + rl.tool(result)
        s += rl.assistant(f"The answer is {result}.")
    s += rl.user(question)
    s += rl.assistant(rl.gen("call", tools=TOOLS, tool_choice="required", max_tokens=60))
    (called,) = s.call_tools()
    s += rl.assistant(rl.gen("answer", max_tokens=24))
    return f"{s['answer']} [{called.arguments['expression']}]"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()
    with backend(given):
        for question in given.questions:
            print(f"{question} -> {agent.run(question, temperature=0).ret_value}")


if __name__ == "__main__":
    main()
