"""Pull fields out of passages, as JSON that is valid by construction.

    python examples/json_extraction.py [--model PATH | --url URL]

The schema steers every token, so whatever the model makes of a passage, `json.loads` accepts it and
the fields have their types.
"""

from __future__ import annotations

import json

import rootlace as rl
from backend import arguments, backend

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}

PASSAGES = [
    "Ida Lund is 47 years old. She lives in Bergfeld.",
    "Karl Brandt lives in Norwick. Karl Brandt is 31 years old.",
    "Maria Costa is 62. Maria Costa comes from Alden.",
]


@rl.function
def extract(s: rl.ProgramState, passage: str) -> None:
    s += rl.user(f"Extract name, age and city as JSON.\n\n{passage}")
    s += rl.assistant(rl.gen("record", max_tokens=96, temperature=0, json_schema=PERSON))


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        for state in extract.run_batch([{"passage": passage} for passage in PASSAGES]):
            person = json.loads(state["record"])
            print(f"{person['name']}, {person['age']}, of {person['city']}")


if __name__ == "__main__":
    main()
