"""Does a real model's file give the tokens that another implementation has for it?

    python -m benchmarks.real_files smollm2 --against transformers
    python -m benchmarks.real_files model.gguf --against http://127.0.0.1:8080   # llama-server
    python -m benchmarks.real_files path/to/folder --against golden_greedy.json

Rootlace serves the model in float32 and answers prompts greedily; the other one is asked what it
takes at each place behind the same tokens, so that a token that differs is counted once. Where
there is a chat template, prompts are conversations. A prompt's text is cut into tokens by both.

`transformers` reads the same file, in float32 (a GGUF file needs the package accelerate, too); a
server of llama.cpp computes as it likes. A JSON file has `results` with `prompt_ids` and
`output_ids`, which are taken as they are. Prints a row of the table in docs/models.md; `--json`
keeps it beside those of other files.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import rootlace as rl
from benchmarks.common import environment, new_parser
from rootlace.runtime.model.checkpoint.source import model_source
from rootlace.runtime.server.model_texts import load_eos_ids
from rootlace.runtime.server.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "How many days are there in a leap year?",
    "Translate 'good morning' to Spanish.",
    "Explain photosynthesis in one sentence.",
    "List five kinds of fruit.",
    "Who wrote Romeo and Juliet?",
    "Write a Python function that adds two numbers.",
    "What is 12 plus 30?",
    "Summarise: The cat sat on the mat. It was warm. It slept all day.",
    "Give me a name for a bakery.",
    "What does HTTP stand for?",
    "Write one sentence that begins with 'Although'.",
    "Is a tomato a fruit or a vegetable?",
    "Extract name and age as JSON: Maria Lopez is 34 years old.",
    "Correct the spelling: 'I recieved teh letter yesterdy.'",
    "What is the opposite of 'ancient'?",
    "Write an SQL query that counts the rows of a table called users.",
    "Describe the moon to a child.",
    "Name a river in Africa and a mountain in Asia.",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Say 'hello' in French, German and Italian.",
    "Write the first line of a detective story.",
)
BEGINNINGS = (
    "Once upon a time",
    "One day, a little girl named Lily",
    "The big dog",
    "Tom and his mom went to the park",
    "There was a small bird who",
    "The sun was hot, and",
    '"Can I play with you?" asked',
    "It was a dark night",
)


@dataclass(frozen=True)
class Answer:
    """`tokens` include the end token, if generated. `margins`: at each place the first token's
    log-probability less the second's."""

    prompt: list[int]
    text: str
    tokens: list[int]
    margins: list[float]


class Other(Protocol):
    """Another implementation of the model."""

    name: str

    def cut(self, text: str) -> list[int]:
        """Tokenize the text."""

    def takes(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """Return its greedy token at each place of the sequence, at most as many as given."""


class Transformers:
    """transformers: one forward pass over a prompt with its answer."""

    def __init__(self, model: Path) -> None:
        import torch
        import transformers

        self.name = f"transformers {transformers.__version__}"
        self._torch = torch
        folder, more = model, {}
        if model.is_file():
            folder, more = model.parent, {"gguf_file": model.name}
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **more)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **more
        ).eval()

    def cut(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def takes(self, prompt: list[int], tokens: list[int]) -> list[int]:
        ids = self._torch.tensor([prompt + tokens])
        with self._torch.inference_mode():
            logits = self._model(ids).logits[0, len(prompt) - 1 : -1]
        return list(logits.argmax(-1).tolist())


class LlamaServer:
    """llama.cpp's server; where its token differs, it is asked again behind Rootlace's token."""

    def __init__(self, url: str, end: int) -> None:
        self._url, self._end = url.rstrip("/"), end
        build = json.load(urllib.request.urlopen(f"{self._url}/props")).get("build_info", "")
        self.name = f"llama.cpp {build}".strip()

    def cut(self, text: str) -> list[int]:
        body = {"content": text, "parse_special": True, "add_special": False}
        return list(asked(f"{self._url}/tokenize", body)["tokens"])

    def takes(self, prompt: list[int], tokens: list[int]) -> list[int]:
        found = list[int]()
        while len(found) < len(tokens):
            body = {
                "prompt": prompt + tokens[: len(found)],
                "n_predict": len(tokens) - len(found),
                "temperature": 0,
                "cache_prompt": False,
                "return_tokens": True,
            }
            reply = asked(f"{self._url}/completion", body)
            more = [*reply["tokens"], *([self._end] if reply["stop_type"] == "eos" else [])]
            left = tokens[len(found) :]
            pairs = enumerate(zip(more, left, strict=False))
            differs = next((place for place, (one, two) in pairs if one != two), len(left) - 1)
            found += more[: differs + 1]
        return found


class Golden:
    """Recorded answers, compared up to the first difference: behind other tokens the recording says
    nothing."""

    def __init__(self, file: Path) -> None:
        self._answers = json.loads(file.read_text("utf-8"))["results"]
        self.name = f"{file.name} (transformers)"
        self.prompts = [entry["prompt"] for entry in self._answers]

    def cut(self, text: str) -> list[int]:
        return next(list(one["prompt_ids"]) for one in self._answers if one["prompt"] == text)

    def takes(self, prompt: list[int], tokens: list[int]) -> list[int]:
        expected: list[int] = next(
            (one["output_ids"] for one in self._answers if one["prompt_ids"] == prompt), []
        )
        pairs = zip(tokens, expected, strict=False)
        same = next((i for i, (one, two) in enumerate(pairs) if one != two), len(tokens) - 1)
        return list(expected[: same + 1])


@dataclass
class Row:
    """A file and another implementation. `least`, `most`: Rootlace's margins where tokens
    differ."""

    file: str
    against: str
    prompts: int
    cut_alike: int
    tokens: int
    equal: int = 0
    least: float | None = None
    most: float | None = None

    def shown(self) -> str:
        differ = "" if self.most is None else f", margins {self.least:.2g} to {self.most:.2g}"
        return (
            f"| {self.file} | {self.against} | {self.cut_alike} of {self.prompts} "
            f"| {self.equal:,} of {self.tokens:,}{differ} |"
        )


def asked(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def answered(url: str, prompt: list[int], text: str, count: int, free: bool) -> Answer:
    """Return Rootlace's greedy answer: at most `count` tokens, or just so many if `free`."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": free}
    body = {"input_ids": prompt, "sampling_params": sampling}
    reply = asked(f"{url}/generate", body | {"return_logprob": True, "top_logprobs_num": 2})
    about = reply["meta_info"]
    margins = [top[0][0] - top[1][0] for top in about["output_top_logprobs"]]
    return Answer(prompt, text, reply["output_ids"], margins)


def answers(runtime: rl.Runtime, prompts: int, count: int, golden: Golden | None) -> list[Answer]:
    url = str(runtime.url)
    bodies: list[dict[str, Any]] = [{"prompt": text} for text in BEGINNINGS]
    if golden is not None:
        bodies = [{"prompt": text} for text in golden.prompts]
    elif asked(f"{url}/api/show", {"model": runtime.model_name})["template"]:
        bodies = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    found = []
    for body in bodies[:prompts]:
        prompt = asked(f"{url}/tokenize", body)["tokens"]
        # The detokenized text has BOS and other special tokens, which `cut` does not add.
        text = asked(f"{url}/detokenize", {"tokens": prompt})["prompt"]
        text = text if golden is None else body["prompt"]
        found.append(answered(url, prompt, text, count, golden is not None))
    return found


def compared(file: str, other: Other, given: list[Answer], ends: list[int]) -> Row:
    alike = sum(other.cut(answer.text) == answer.prompt for answer in given)
    row, margins = Row(file, other.name, len(given), alike, 0), []
    for answer in given:
        taken = other.takes(answer.prompt, answer.tokens)
        same = [
            one == two or (one in ends and two in ends)
            for one, two in zip(answer.tokens, taken, strict=False)
        ]
        row.tokens += len(same)
        row.equal += sum(same)
        margins += [
            margin for margin, equal in zip(answer.margins, same, strict=False) if not equal
        ]
    if margins:
        row = replace(row, least=round(min(margins), 5), most=round(max(margins), 5))
    return row


def keep(file: Path, row: Row) -> None:
    """Put the row among other files' rows, in place of an earlier one."""
    kept = json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []
    name = row.against.split()[0]
    kept = [one for one in kept if (one["file"], one["against"].split()[0]) != (row.file, name)]
    kept.append(asdict(row) | {"environment": environment("gguf")})
    kept.sort(key=lambda one: one["file"])
    file.write_text(json.dumps({"rows": kept}, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = new_parser("real_files", __doc__)
    parser.add_argument("model", help="folder, GGUF file or name")
    parser.add_argument("--against", required=True, help="transformers, an address, a JSON file")
    parser.add_argument("--prompts", type=int, default=24, help="at most")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    arguments = parser.parse_args()
    golden = Golden(Path(arguments.against)) if arguments.against.endswith(".json") else None
    with rl.Runtime(arguments.model, dtype="float32", device="cpu", http_port=0) as runtime:
        given = answers(runtime, arguments.prompts, arguments.tokens, golden)
        about = json.load(urllib.request.urlopen(f"{runtime.url}/get_model_info"))
    path = Path(about["model_path"])
    source = model_source(path)
    ends = sorted(load_eos_ids(source, Tokenizer.read(source)))
    other: Other = golden or (
        Transformers(path)
        if arguments.against == "transformers"
        else LlamaServer(arguments.against, ends[0])
    )
    row = compared(path.name, other, given, ends)
    print(row.shown())
    if arguments.json is not None:
        keep(arguments.json, row)
    if row.equal == 0:
        sys.exit("no token is equal: this is not the same model")


if __name__ == "__main__":
    main()
