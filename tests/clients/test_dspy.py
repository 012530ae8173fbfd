"""dspy: retrieval-augmented answers by a schema, and a ReAct agent."""

from __future__ import annotations

from typing import Any

import pytest

dspy = pytest.importorskip("dspy", reason="needs the extra `clients-all`")

FIELD = r"\[\[ ## {} ## \]\]\n{}\n\n"


def model(url: str, **more: Any) -> Any:
    return dspy.LM(
        "openai/demo", api_base=f"{url}/v1", api_key="none", temperature=0, cache=False, **more
    )


def form(**fields: str) -> dict[str, Any]:
    """Return dspy's own form of an answer as a regex, which is too hard for this small model."""
    text = "".join(FIELD.format(name, value) for name, value in fields.items())
    return {"extra_body": {"regex": text + r"\[\[ ## completed ## \]\]"}}


def test_retrieval(url: str) -> None:
    texts = ["Paris is large.", "Ida is 47.", "The tree is green."]
    embed = dspy.Embedder("openai/demo", api_base=f"{url}/v1", api_key="none", caching=False)
    search = dspy.retrievers.Embeddings(embedder=embed, corpus=texts, k=1, cache=False)
    found = search("Paris is large.")
    assert found.passages == ["Paris is large."]
    answer = dspy.Predict("context: list[str], question: str -> answer: str, sure: bool")
    lm = model(url, **form(answer=r"[a-zA-Z ]{1,20}", sure="(True|False)"))
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        said = answer(context=found.passages, question="Is Paris large?")
    assert isinstance(said.sure, bool) and 1 <= len(said.answer) <= 20


def test_react(url: str) -> None:
    asked = []

    def calculator(expression: str) -> str:
        """Computes."""
        asked.append(expression)
        return "42"

    react = dspy.ReAct("question -> answer", tools=[calculator], max_iters=2)
    step = form(
        next_thought=r"[a-z ]{1,20}",
        next_tool_name="calculator",
        next_tool_args=r'\{"expression": "12 \+ 30"\}',
    )
    react.react.set_lm(model(url, **step))
    react.extract.set_lm(model(url, **form(reasoning="[a-z ]{1,20}", answer=r"[0-9]{2}")))
    with dspy.context(adapter=dspy.ChatAdapter()):
        said = react(question="What is 12 + 30?")
    assert asked == ["12 + 30"] * 2
    assert said.answer.isdigit() and said.trajectory["observation_1"] == "42"
