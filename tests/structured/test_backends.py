"""The backends as one: the same masks on the same languages, the same behaviour of matchers."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured import GrammarCompiler, Matcher
from rootlace.runtime.structured.vocabulary import vocabulary as bitmask
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint
from tests.structured.canonical_tokens import encode

BACKENDS = ("automaton", "llguidance", "outlines_core")

REGEXES = [
    r"[0-9]+(\.[0-9]+)?",  # what outlines-core's index alone gets wrong
    r"a(,a)*",
    r"a(bb)?",
    r"(yes|no|maybe)!?",
    r"\d{4}-\d{2}-\d{2}",
    r"[a-z]{1,6}( [a-z]{1,6}){0,3}\.",
    r"é+|ü|日本?",
    r"(?i:abc|abd)+x{3}",
    r"[^\"\\]{0,5}\"",
    r"(a|b)*abb",
    r"/\*[^*]*\*/",
    r"",
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<eos>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ['{"name":"Mara","age":34,"tags":["a","b"]} yes no maybe 123.45 abb 2024-01-31 日本 é']
    tokenizer.train_from_iterator(texts * 3, trainer)
    size = tokenizer.get_vocab_size() + 13  # a model may pad its vocabulary
    return Vocabulary.from_tokenizer(tokenizer, size, [0, 1])


@pytest.fixture(scope="module")
def compilers(vocabulary: Vocabulary) -> dict[str, GrammarCompiler]:
    return {
        backend: GrammarCompiler(vocabulary, config=ConstraintConfig(backend=backend))  # type: ignore[arg-type]
        for backend in BACKENDS
    }


def packed(matcher: Matcher, size: int) -> np.ndarray:
    words = np.full((size + 31) // 32, -1, np.int32)
    matcher.fill_bitmask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[size:].any()
    return bits[:size]


def walk_together(vocabulary: Vocabulary, matchers: list[Matcher], rng: random.Random) -> bytes:
    """Walk all matchers together at random; return the text at the end."""
    taken: list[int] = []
    while True:
        masks = [packed(matcher, vocabulary.size) for matcher in matchers]
        for mask in masks[1:]:
            assert (mask == masks[0]).all(), vocabulary.token_bytes[(mask != masks[0]).argmax()]
        assert len({matcher.is_accepting() for matcher in matchers}) == 1
        assert len({matcher.is_finished() for matcher in matchers}) == 1
        assert (matchers[0].allowed_mask() == masks[0]).all()
        ends = list(vocabulary.eos_token_ids)
        assert masks[0][ends].all() == masks[0][ends].any() == matchers[0].is_accepting()
        tokens, others = np.flatnonzero(masks[0]), np.flatnonzero(~masks[0])
        assert len(tokens), "a dead end"
        token = int(rng.choice(tokens))
        if matchers[0].is_accepting() and (len(taken) > 30 or rng.random() < 0.2):
            token = rng.choice(ends)
        for matcher in matchers:
            for wrong in (int(rng.choice(others)), vocabulary.size, vocabulary.size + 99, -1):
                assert not matcher.advance(wrong)
                assert matcher.error()
            assert matcher.advance(token)
            assert not matcher.error()
        if token in ends:
            break
        taken.append(token)
        if rng.random() < 0.1:
            count = rng.randint(0, len(taken))
            for matcher in matchers:
                matcher.rollback(count)
            taken = taken[: len(taken) - count]
    for matcher in matchers:
        assert matcher.is_accepting()
        assert matcher.is_finished()
        assert not packed(matcher, vocabulary.size).any()
        assert not matcher.advance(token)
        assert matcher.forced_text() == b""
        assert matcher.forced_tokens() == []
        matcher.rollback(1)
        assert matcher.is_accepting()
        with pytest.raises(ValueError, match="cannot undo"):
            matcher.rollback(len(taken) + 1)
        matcher.reset()
    return b"".join(vocabulary.token_bytes[token] for token in taken)


@pytest.mark.parametrize("pattern", REGEXES)
def test_masks_are_equal_state_by_state(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler], pattern: str
) -> None:
    grammars = [compiler.compile(regex=pattern) for compiler in compilers.values()]
    assert [grammar.backend for grammar in grammars] == list(BACKENDS)
    assert all(grammar.nbytes > 0 for grammar in grammars)
    matchers = [grammar.matcher() for grammar in grammars]
    rng = random.Random(pattern)
    for _ in range(6):
        text = walk_together(vocabulary, matchers, rng)
        assert re.fullmatch(pattern, text.decode())


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mara", "Jo"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("whitespace", ["compact", "flexible"])
@pytest.mark.parametrize("backend", ["automaton", "llguidance", "outlines_core", "auto"])
def test_schemas_on_each_backend(vocabulary: Vocabulary, backend: Any, whitespace: str) -> None:
    compiler = GrammarCompiler(vocabulary, config=ConstraintConfig(backend=backend))
    grammar = compiler.compile(json_schema=SCHEMA, whitespace=whitespace)
    assert grammar.backend == ("automaton" if backend == "auto" else backend)
    rng = random.Random(3)
    seen = set()
    for _ in range(5):
        text = walk_together(vocabulary, [grammar.matcher()], rng).decode()
        jsonschema.validate(json.loads(text), SCHEMA)
        seen.add(text)
        if whitespace == "compact":
            assert " " not in text
    assert len(seen) > 1


def test_forced_text_is_the_same_and_followed_by_all(
    vocabulary: Vocabulary, compilers: dict[str, GrammarCompiler]
) -> None:
    matchers = {
        name: compiler.compile(regex='\\{"name":"(Mara|Mo)","age":[0-9]{1,3}\\}').matcher()
        for name, compiler in compilers.items()
    }
    for matcher in matchers.values():
        assert matcher.forced_text() == b'{"name":"M'
        tokens = matcher.forced_tokens()
        canonical = encode(vocabulary, b'{"name":"Mara","age":1}')
        assert tokens == canonical[: len(tokens)]
        for token in tokens:
            assert matcher.advance(token)
    assert len({tuple(m.forced_tokens()) for m in matchers.values()}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_matchers_of_one_grammar_do_not_share_state(
    compilers: dict[str, GrammarCompiler], vocabulary: Vocabulary, backend: str
) -> None:
    grammar = compilers[backend].compile(regex="ab")
    a, b = (encode(vocabulary, letter)[0] for letter in (b"a", b"b"))
    first, second = grammar.matcher(), grammar.matcher()
    assert first.advance(a)
    assert not second.advance(b)
    assert first.advance(b)
    assert first.is_finished()
    assert not second.is_finished()
    assert second.advance(a)
    assert not first.can_rollback
    assert first.rollback_refused() is None
    assert first.error()


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_tokens_belong_to_who_asked(vocabulary: Vocabulary, backend: Any) -> None:
    """Also where a grammar remembers them for all requests, and wherever one stands."""
    compiler = GrammarCompiler(vocabulary, config=ConstraintConfig(backend=backend))
    grammar = compiler.compile(regex='\\{"name":"(Mara|Ida)","age":[0-9]\\}')
    wanted = list(grammar.matcher().forced_tokens())
    assert wanted
    tokens = encode(vocabulary, b'{"name":"Mara","age":3}')
    runs = []
    for _ in range(3):
        matcher = grammar.matcher()
        found = []
        for token in tokens:
            found.append(list(matcher.forced_tokens()))
            matcher.forced_tokens().append(7)
            assert matcher.forced_tokens() == found[-1]
            assert matcher.advance(token)
        runs.append(found)
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0] == wanted
    # Taken in otherwise, so many tokens are another place.
    spelt = grammar.matcher()
    spelt.forced_tokens()
    for byte in vocabulary.bytewise(b'{"name":"Mar')[: len(wanted)]:
        assert spelt.advance(byte)
    same = grammar.matcher()
    for byte in vocabulary.bytewise(b'{"name":"Mar')[: len(wanted)]:
        assert same.advance(byte)
    assert spelt.forced_tokens() == same.forced_tokens()


@pytest.mark.parametrize("backend", ["automaton", "outlines_core"])
def test_what_is_not_regular_needs_llguidance(
    compilers: dict[str, GrammarCompiler], backend: str
) -> None:
    compiler = compilers[backend]
    with pytest.raises(InvalidConstraint, match=f"not regular.*{backend}"):
        compiler.compile(ebnf='root ::= "(" root ")" | "x"')
    with pytest.raises(InvalidConstraint, match=f"json_schema.*{backend}"):
        compiler.compile(json_schema={"type": "object"})
    assert compiler.compile(ebnf='root ::= "a" | "b"').backend == backend


def test_beyond_the_caps_llguidance_takes_over(vocabulary: Vocabulary) -> None:
    config = ConstraintConfig(max_states=50)
    auto = GrammarCompiler(vocabulary, config=config)
    assert auto.compile(regex="[ab]{2,40}").backend == "automaton"
    large = auto.compile(regex="[ab]{2,400}|x")
    assert large.backend == "llguidance"
    assert re.fullmatch(
        "[ab]{2,400}|x",
        walk_together(vocabulary, [large.matcher()], random.Random(0)).decode(),
    )
    only = GrammarCompiler(vocabulary, config=dataclasses.replace(config, backend="automaton"))
    with pytest.raises(InvalidConstraint, match="more than 50 positions"):
        only.compile(regex="[ab]{2,400}|x")


def test_growing_beyond_the_caps_goes_on_in_llguidance(vocabulary: Vocabulary) -> None:
    """Few items, exponentially many states: the automaton notices while it is used."""
    pattern = "(a|b)*a(a|b){9}"
    compiler = GrammarCompiler(vocabulary, config=ConstraintConfig(max_states=60))
    plain = GrammarCompiler(vocabulary, config=ConstraintConfig(backend="llguidance"))
    grammar = compiler.compile(regex=pattern)
    assert grammar.backend == "automaton"
    rng = random.Random(4)
    for _ in range(3):
        pair = [grammar.matcher(), plain.compile(regex=pattern).matcher()]
        assert re.fullmatch(pattern, walk_together(vocabulary, pair, rng).decode())


def test_outlines_core_is_bounded_before_it_builds(vocabulary: Vocabulary) -> None:
    config = ConstraintConfig(backend="outlines_core", compile_memory_bytes=1 << 20)
    compiler = GrammarCompiler(vocabulary, config=config)
    with pytest.raises(InvalidConstraint, match="compile_memory_bytes"):
        compiler.compile(regex=".{0,500}")
    with pytest.raises(InvalidConstraint, match="look-around"):
        compiler.compile(regex="(?=.*a)[abc]{3}")


def test_a_mask_beyond_its_bounds_ends_the_text(vocabulary: Vocabulary) -> None:
    """llguidance counts the cost of a mask; here every mask costs too much after `x`."""
    compiler = GrammarCompiler(vocabulary, config=ConstraintConfig(backend="llguidance"))
    matcher = compiler.compile(regex="x(([a-z]{1,100000}y){1,1000}z){1,100}").matcher()
    assert matcher.advance(encode(vocabulary, b"x")[0])
    steps = 0
    while matcher.allowed_mask().any() and steps < 300:
        token = int(np.flatnonzero(matcher.allowed_mask())[steps % 7])
        steps += 1
        if not matcher.advance(token):
            break
    if not matcher.allowed_mask().any():
        assert matcher.error()
        assert not matcher.is_accepting()
        assert not matcher.is_finished()


def test_a_request_does_not_pay_for_the_states_of_others(vocabulary: Vocabulary) -> None:
    """The lexer of a grammar is shared, and its states are bounded: here to 1,000."""
    config = ConstraintConfig(backend="llguidance", compile_memory_bytes=1)
    grammar = GrammarCompiler(vocabulary, config=config).compile(regex="(a|b)*a(a|b){30}x")
    letters = [encode(vocabulary, letter)[0] for letter in (b"a", b"b")]
    rng = random.Random(0)
    for _ in range(12):
        matcher = grammar.matcher()
        for _ in range(200):
            assert matcher.allowed_mask()[letters].all(), matcher.error()
            assert matcher.advance(rng.choice(letters)), matcher.error()


# ---------------------------------------------------------------- real tokenizers


CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": r"[A-Z][a-z]{2,8} (is|was) [0-9]{1,3}( years| days)?\."},
    {"choices": ["positive", "negative", "né utre", "日本語"]},
    {"json_schema": SCHEMA},
    {"json_schema": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
    {"json_schema": bool, "whitespace": "flexible"},
    {"ebnf": 'root ::= "(" root ")" | [0-9]+'},
    {
        "structural_tag": {
            "type": "structural_tag",
            "triggers": ["<f="],
            "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
        }
    },
]


def check_api(tokenizer: Any, **options: Any) -> None:
    """Check the documentation item by item, on one tokenizer."""
    compiler = GrammarCompiler(tokenizer, **options)
    vocabulary = compiler.vocabulary
    rng = np.random.default_rng(1)
    for arguments in CONSTRAINTS:
        grammar = compiler.compile(**arguments)
        assert compiler.compile(**arguments) is grammar
        matcher = grammar.matcher()
        for _ in range(2):
            ids: list[int] = []
            while len(ids) < 40:
                mask = matcher.allowed_mask()
                assert mask.shape == (vocabulary.size,)
                assert (packed(matcher, vocabulary.size) == mask).all()
                forced = matcher.forced_tokens()
                text = matcher.forced_text()
                assert text.startswith(b"".join(vocabulary.token_bytes[t] for t in forced))
                if forced:
                    assert mask[forced[0]]
                choices = np.flatnonzero(mask)
                token = int(rng.choice(choices))
                if token in vocabulary.eos_token_ids or matcher.is_finished():
                    break
                assert matcher.advance(token)
                ids.append(token)
            check_text(arguments, vocabulary, matcher, ids)
            matcher.reset()


def check_text(
    arguments: dict[str, Any], vocabulary: Vocabulary, matcher: Matcher, ids: list[int]
) -> None:
    if not matcher.is_accepting():
        return
    text = b"".join(vocabulary.token_bytes[token] for token in ids).decode()
    if "regex" in arguments:
        assert re.fullmatch(arguments["regex"], text)
    elif "choices" in arguments:
        assert text in arguments["choices"]
    elif arguments.get("json_schema") is bool:
        assert text.strip() in ("true", "false")
    elif "json_schema" in arguments:
        jsonschema.validate(json.loads(text), arguments["json_schema"])


@pytest.mark.slow
def test_the_interface_on_a_byte_level_tokenizer(shared_dir: Path) -> None:
    check_api(AutoTokenizer.from_pretrained(shared_dir / "data" / "tokenizers" / "gpt2"))


@pytest.mark.slow
def test_the_interface_on_sentencepiece_with_byte_fallback(shared_dir: Path) -> None:
    folder = shared_dir / "data" / "models" / "stories3M"
    check_api(AutoTokenizer.from_pretrained(folder))
    check_api(Tokenizer.from_file(str(folder / "tokenizer.json")), eos_token_ids=[1, 2])


def test_the_interface_on_the_demo_model(demo_model: Path) -> None:
    tokenizer = (demo_model / "tokenizer.json").read_text("utf-8")
    compiler = GrammarCompiler(Vocabulary(tokenizer, 4160, [0]))
    assert compiler.vocabulary.size == 4160
    check_api(AutoTokenizer.from_pretrained(demo_model))


@pytest.fixture(scope="module")
def gpt2(shared_dir: Path) -> Vocabulary:
    file = shared_dir / "data" / "tokenizers" / "gpt2" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    return Vocabulary.from_tokenizer(tokenizer, 50304, [tokenizer.token_to_id("<|endoftext|>")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "config"),
    [
        (REGEXES[8], ConstraintConfig(backend="automaton")),
        (r"\w+ \w+", ConstraintConfig(backend="automaton")),
        (r".{0,20}", ConstraintConfig(backend="automaton")),
        (r"[0-9]+(\.[0-9]+)?", ConstraintConfig(backend="automaton")),
        (r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"', ConstraintConfig(backend="automaton")),
        (r"(?:foo|bar|bazé)+", ConstraintConfig(backend="automaton")),
        (r"[가-힣]{1,5}x?", ConstraintConfig(backend="automaton")),
        ("[ab]*a[ab]{14}", ConstraintConfig(max_states=64)),  # llguidance takes over
    ],
)
def test_large_vocabularies_agree_too(
    gpt2: Vocabulary, pattern: str, config: ConstraintConfig
) -> None:
    theirs = GrammarCompiler(gpt2, config=ConstraintConfig(backend="llguidance"))
    grammars = [
        one.compile(regex=pattern) for one in (GrammarCompiler(gpt2, config=config), theirs)
    ]
    assert [grammar.backend for grammar in grammars] == ["automaton", "llguidance"]
    for seed in range(4):
        walk_together(gpt2, [grammar.matcher() for grammar in grammars], random.Random(seed))


@pytest.mark.slow
def test_outlines_core_agrees_on_a_large_vocabulary(demo_model: Path) -> None:
    """Its index takes seconds: of the smaller one."""
    vocabulary = Vocabulary.from_tokenizer(AutoTokenizer.from_pretrained(demo_model))
    grammars = [
        GrammarCompiler(
            vocabulary,
            config=ConstraintConfig(backend=backend),  # type: ignore[arg-type]
        ).compile(regex=REGEXES[0])
        for backend in BACKENDS
    ]
    walk_together(vocabulary, [grammar.matcher() for grammar in grammars], random.Random(1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choices": ["b"]}, "exactly one.*regex, choices"),
        ({"regex": 3}, "regex: must be a string"),
        ({"regex": "a", "whitespace": "none"}, "whitespace"),
        ({"choices": ["\ud800"]}, r"choices"),
        ({"json_schema": {"a": float("nan")}}, "json_schema"),
        ({"json_schema": '{"const": NaN}'}, "NaN"),
        ({"choices": ["a", ""]}, r"choices\[1\]"),
    ],
)
def test_wrong_arguments(
    compilers: dict[str, GrammarCompiler], arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConstraint, match=said):
        compilers["automaton"].compile(**arguments)


CHECKED = ("json_schema", '{"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": true}')


@pytest.mark.parametrize(
    ("backend", "source"),
    [*((backend, ("regex", "[ab]{3}")) for backend in BACKENDS), ("llguidance", CHECKED)],
)
def test_a_mask_is_written_only_where_it_fits(compilers, backend, source) -> None:
    """llguidance writes to an address: nothing else may be behind it than such an array."""
    compiler = compilers[backend]
    matcher = compiler.compile(Constraint(*source)).matcher()
    size = compiler.vocabulary.size
    words = (size + 31) // 32
    read_only = np.zeros(words, np.int32)
    read_only.flags.writeable = False
    wrong: list[Any] = [
        np.zeros(words - 1, np.int32),
        np.zeros(words + 1, np.int32),
        np.zeros((1, words), np.int32),
        np.zeros(words, np.int64),
        np.zeros(words, np.float32),
        np.zeros(words, ">i4"),
        np.zeros(2 * words, np.int32)[::2],
        np.zeros(words, np.int32)[::-1],
        read_only,
    ]
    for out in wrong:
        with pytest.raises(ValueError, match="bit mask"):
            matcher.fill_bitmask(out)
        assert not out.any()
    for out in ([0] * words, None):
        with pytest.raises(TypeError, match="bit mask"):
            matcher.fill_bitmask(out)
    tensor = torch.zeros(words, dtype=torch.int32)
    matcher.fill_bitmask(tensor)  # type: ignore[arg-type]
    assert np.array_equal(bitmask.unpacked(tensor.numpy(), size), matcher.allowed_mask())
    assert matcher.allowed_mask().any()
