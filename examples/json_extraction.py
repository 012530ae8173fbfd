"""Extract people from passages, as values of a type of your own.

    python examples/json_extraction.py [--model NAME | --url URL]

`gen(type=...)` constrains the text to the type's JSON, and `state["person"]` is the value: no
parsing, no retries. Braces and names of fields are forced tokens, which are not sampled. The last
line counts them.

SmolLM2-135M copies fields out of one or two sentences. The model does not infer facts that the
text does not state, such as an age from a year of birth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

import rootlace as rl
from backend import arguments, backend


@dataclass
class Person:
    name: Annotated[str, msgspec.Meta(max_length=40)]
    age: Annotated[int, msgspec.Meta(ge=0, le=150)]
    city: Annotated[str, msgspec.Meta(max_length=40)]


PASSAGES = [
    "Ida Lund is 47 years old. She lives in Bergfeld.",
    "Karl Brandt lives in Norwick. Karl Brandt is 31 years old.",
    "Tom Lee is 25. He lives in Ulm.",
]


@rl.function
def extract(s: rl.ProgramState, passage: str) -> None:
    s += rl.user(f"Extract name, age and city as JSON.\n\n{passage}")
    s += rl.assistant(rl.gen("person", type=Person, max_tokens=96, temperature=0))


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        states = extract.run_batch([{"passage": passage} for passage in PASSAGES])
        people: list[Person] = [state["person"] for state in states]
        for person in sorted(people, key=lambda person: person.age):
            print(f"{person.name} of {person.city} will be {person.age + 1}")
        metas = [state.get_meta_info("person") for state in states]
        forced = sum(meta["forced_tokens"] for meta in metas)
        print(f"{forced} of {sum(meta['completion_tokens'] for meta in metas)} tokens were forced")


if __name__ == "__main__":
    main()
