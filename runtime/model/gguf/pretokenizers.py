"""How BPE tokenizers of GGUF files split a text before they merge, as llama.cpp does it.

A text is split by the first pattern into what matches and what lies between, each of these by the
next one, and so on. Where a pattern of llama.cpp deviates from the tokenizer that it was made for,
it is llama.cpp's that counts. As there, text is not normalised.
"""

from __future__ import annotations

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"


def _words(digits: str) -> str:
    """Words with what stands before them, numbers of so many `digits`, runs of signs, spaces."""
    return (
        rf"(?:{_ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(ending: str, digits: str) -> str:
    """Words that are cut where a small letter is followed by another."""
    large, small = r"(?=\p{L})[^a-z]", r"(?=\p{L})[^A-Z]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}(?:{large})*(?:{small})+{ending}|{before}(?:{large})+(?:{small})*{ending}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3, _QWEN2 = _words("{1,3}"), _words("")
_GPT4O = _cased(rf"(?:{_ANY_CASE})?", "{1,3}")
_DIGITS = r"\p{N}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "a.x-4.0", "mellum", "gigachat"),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (_DIGITS, _GPT2),
    ),
    **dict.fromkeys(
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "pixtral",
            "lfm2",
            "dbrx",
            "smaug-bpe",
            "chatglm-bpe",
            "glm4",
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "kanana2"), (_GPT4O,)),
    "tekken": (_cased("", ""),),
    "seed-coder": (
        rf"(?:{_ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        rf"|{_SPACES}",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[一-龥ࠀ-一가-\ud7ff]+",
        _DIGITS,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""By `tokenizer.ggml.pre`."""

WHOLE = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken", "glm4")
)
"""Those whose pieces, where they are tokens, stay whole, whatever merges there are."""
