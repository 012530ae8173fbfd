"""What llama.cpp makes of texts with SmolLM2's GGUF file, kept in llama_cpp_ids.json.

    CMAKE_ARGS="-DLLAVA_BUILD=off -DGGML_NATIVE=off" pip install llama-cpp-python==0.3.36
    python -m tests.model.gguf.llama_cpp_ids MODEL.gguf

writes that file; llama.cpp compiles for minutes. A row is a text, its ids where markers are text,
and its ids where they are special tokens.
"""

import json
import random
import sys
from importlib.metadata import version
from pathlib import Path

KEPT = Path(__file__).with_suffix(".json")
SEED, TEXTS = 20261128, 300
PARTS = (
    *("Hello", "world", "the", "quick brown fox", "naïve", "café", "Ünïcödé", "straße"),
    *("ÅNGSTRÖM", "I'm", "it's", "IT'S", "we'll", "'tis", "don’t", "o'clock", "'", "''", "'ſ"),
    *("'LL", "0", "7", "42", "1234567", "3.14159", "1,000,000", "½", "٣٤", "Ⅷ", "1e-7", "0x1F"),
    *("x86_64", "北京，好。", "日本語カナ", "한국어", "ไทย", "हिन\u094dदी", "עברית", "العربية"),
    *("Ελληνικά", "Привет", "😀", "👩\u200d👩\u200d👧", "🇨🇭", "👍🏽", "e\u0301", "\u200b"),
    *("\ufeff", "\xa0", "\u3000", "\u2028", "ﬁ", "𝒳", " ", "  ", "   ", "\t", "\t\t", "\n"),
    *("\n\n", "\r\n", " \n", "\n ", "\x0b", "\x0c", "\x85", ".", ",", "!", "?!", "...", "…"),
    *("--", "—", "_", "__", "#", "##", "@", "$", "%", "&&", "||", "(", ")", "[", "]", "{", "}"),
    *("<", ">", "</", "/>", '"', '\\"', "\\n", "`", "```", "=>", "!=", "def f(x):"),
    *("return x+1;", "    if", "{'a': 1}", '{"k": [1, 2]}', "https://a.b/c?d=e", "a@b.co"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|", "im_end|>", "<repo_name>"),
    *("<jupyter_output>", "<file_sep>", "<s>", "</s>", "<unk>", "<0x41>", "▁", "Ġ", "Ċ"),
    *("\x00", "\x7f"),
)
"""Pieces: a text is some of these in a row, with or without spaces between."""


def texts() -> list[str]:
    chance = random.Random(SEED)
    found = ["", *PARTS]
    while len(found) < TEXTS:
        between = chance.choice(("", "", " ", " ", "\n"))
        found.append(between.join(chance.choices(PARTS, k=chance.randint(2, 12))))
    return found


def record(model: str) -> None:
    import llama_cpp

    llama = llama_cpp.Llama(model, vocab_only=True, verbose=False)

    def ids(text: str, special: bool) -> str:
        found = llama.tokenize(text.encode(), add_bos=False, special=special)
        return " ".join(map(str, found))

    rows = [[text, ids(text, False), ids(text, True)] for text in texts()]
    head = {
        "command": "python -m tests.model.gguf.llama_cpp_ids MODEL.gguf",
        "llama-cpp-python": version("llama-cpp-python"),
        "model": Path(model).name,
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    KEPT.write_text(f'{json.dumps(head)[:-1]},\n"rows": [\n{lines}\n]}}\n', "utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
