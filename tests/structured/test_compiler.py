"""Grammars: what the mask allows is what `advance` accepts is what independent checkers accept."""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rootlace.runtime.structured import GrammarCompiler, Matcher
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ['{"name":"Mara","age":34,"tags":["a","b"]} yes no maybe 123.45'] * 3, trainer
    )
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    # A model's vocabulary may be padded beyond the tokenizer's.
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.get_vocab_size() + 13, eos_token_ids=[0])


def allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    words = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    matcher.fill_bitmask(words)
    return np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0].tolist()


def random_text(tokenizer: Tokenizer, matcher: Matcher, rng: random.Random) -> str:
    """A random walk through the mask until the grammar is finished or the end is drawn."""
    vocab_size = tokenizer.get_vocab_size() + 13
    ids: list[int] = []
    while not matcher.is_finished():
        tokens = allowed(matcher, vocab_size)
        assert tokens, "a dead end"
        assert max(tokens) < tokenizer.get_vocab_size()
        assert (0 in tokens) == matcher.is_accepting()
        token = 0 if 0 in tokens and (rng.random() < 0.2 or len(ids) > 200) else rng.choice(tokens)
        if token == 0:
            break
        assert matcher.advance(token)
        ids.append(token)
    return tokenizer.decode(ids)


@pytest.mark.parametrize("pattern", [r"[0-9]{2,3}", r"(a|bb)*c", r"[0-9]+(\.[0-9]+)?", r"é+|ü"])
def test_regex_outputs_match_re(tokenizer, compiler, pattern) -> None:
    rng = random.Random(0)
    for _ in range(20):
        matcher = compiler.compile(Constraint("regex", pattern)).matcher()
        assert re.fullmatch(pattern, random_text(tokenizer, matcher, rng))


def test_schema_outputs_validate_and_are_compact(tokenizer, compiler) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    rng = random.Random(1)
    for _ in range(20):
        matcher = compiler.compile(
            Constraint("json_schema", json.dumps(schema), "compact")
        ).matcher()
        value = json.loads(text := random_text(tokenizer, matcher, rng))
        jsonschema.validate(value, schema)
        compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        # Escapes in the name may be written in more than one way; structure may not.
        assert len(text) - len(compact) == 0 or "\\" in text


def test_choices_end_in_exactly_one_of_them(tokenizer, compiler) -> None:
    choices = ["yes", "no", 'say "hi"', "yes indeed", "née"]
    rng = random.Random(2)
    seen = {
        random_text(
            tokenizer,
            compiler.compile(Constraint("choices", json.dumps(choices))).matcher(),
            rng,
        )
        for _ in range(60)
    }
    assert seen <= set(choices)
    assert len(seen) >= 4


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint("regex", "(a"), "position 0"),
        (Constraint("regex", "(?=a)b"), "no text"),
        (Constraint("json_schema", "{"), "not JSON"),
        (Constraint("json_schema", "[1]"), "object or boolean"),
        (Constraint("json_schema", "false"), "allows nothing"),
        (Constraint("json_schema", '{"type": "foo"}'), "foo"),
        (
            Constraint("json_schema", '{"uniqueItems": true, "type": "array"}', strict=True),
            "uniqueItems",
        ),
        (
            Constraint("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
            "#: nothing satisfies",
        ),
        (Constraint("choices", '"a"'), "JSON array"),
        (Constraint("choices", "[]"), "JSON array"),
        (Constraint("choices", '["a", 3]'), r"choices\[1\]"),
        (Constraint("choices", r'["a", "\ud800"]'), "surrogate"),
        (Constraint("ebnf", "start: missing"), "missing"),
        (Constraint("regex", "a" * (2**20 + 1)), "exceed"),
    ],
)
def test_what_cannot_hold_is_refused_with_a_reason(compiler, constraint, said) -> None:
    with pytest.raises(InvalidConstraint, match=said):
        compiler.compile(constraint)


SPELLED = "ab <eos> <eos"


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("choices", json.dumps([SPELLED])),
        Constraint("regex", SPELLED),
        Constraint("json_schema", json.dumps({"const": SPELLED})),
        Constraint("ebnf", f"start: {json.dumps(SPELLED)}"),
    ],
    ids=lambda constraint: constraint.kind,
)
def test_text_spelled_like_a_special_token_is_text(tokenizer, compiler, constraint) -> None:
    text = random_text(tokenizer, compiler.compile(constraint).matcher(), random.Random(1))
    assert text == (json.dumps(SPELLED) if constraint.kind == "json_schema" else SPELLED)


def test_an_added_token_that_is_not_special_is_text(tokenizer: Tokenizer) -> None:
    larger = Tokenizer.from_str(tokenizer.to_str())
    larger.add_tokens(["<tool_call>"])
    compiler = GrammarCompiler(larger, eos_token_ids=[0])
    matcher = compiler.compile(Constraint("regex", "a<tool_call>b")).matcher()
    size, ids = larger.get_vocab_size(), []
    while not matcher.is_finished():
        ids.append(allowed(matcher, size)[0])
        assert matcher.advance(ids[-1]), matcher.error()
    assert larger.decode(ids) == "a<tool_call>b"


def test_free_text_holds_no_token_of_the_padding(tokenizer, compiler) -> None:
    matcher = compiler.compile(Constraint("regex", "(?s:.)+")).matcher()
    tokens = allowed(matcher, tokenizer.get_vocab_size() + 13)
    assert 0 not in tokens
    assert max(tokens) < tokenizer.get_vocab_size()


def test_choices_hold_any_character(tokenizer, compiler) -> None:
    text = "".join(map(chr, range(1, 0xA0))) + "\u2028\U0001f600"
    choices = Constraint("choices", json.dumps([text]))
    assert random_text(tokenizer, compiler.compile(choices).matcher(), random.Random(1)) == text


def test_thousands_of_choices(tokenizer, compiler) -> None:
    choices = [f"choice {i}" for i in range(5000)]
    grammar = compiler.compile(Constraint("choices", json.dumps(choices)))
    for seed in range(5):
        assert random_text(tokenizer, grammar.matcher(), random.Random(seed)) in choices


def test_what_is_no_fast_tokenizer_is_refused(tokenizer) -> None:
    class Slow:
        eos_token_id = 0

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    for wrong in (Slow(), "gpt2", None):
        with pytest.raises(TypeError, match=f"fast tokenizer.*{type(wrong).__name__}"):
            GrammarCompiler(wrong)
    with pytest.raises(ValueError, match="give eos_token_ids"):
        GrammarCompiler(tokenizer)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    for wrong, eos in ((words, 0), (tokenizer, 10**6)):  # no bytes; no such token
        with pytest.raises(InvalidConstraint, match="with this tokenizer"):
            GrammarCompiler(wrong, eos_token_ids=[eos])


def test_a_merge_of_tokens_that_there_are_not_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    spec = json.loads(tokenizer.to_str())
    for merge in ("a c", ["a", "c"]):
        spec["model"]["merges"] = [merge]
        with pytest.raises(InvalidConstraint, match=r"with this tokenizer.*`c` out of vocab"):
            Vocabulary(json.dumps(spec), 2, [0])


def test_a_constraint_is_given_once(compiler) -> None:
    with pytest.raises(TypeError, match="by its name, not str"):
        compiler.compile("[ab]")
    with pytest.raises(TypeError, match="either"):
        compiler.compile(Constraint("regex", "a"), regex="b")


def test_an_error_in_lark_quotes_nothing_that_is_not_the_users(compiler) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        compiler.compile(ebnf="start: a")
    assert str(caught.value) == 'ebnf: line 1, column 8: unknown name: "a"'
