"""The embedded demo model: its folder, its template, its corpus, and that its answers are right."""

import json
import re
import zlib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from examples.demo_model import asks, corpus, labels, passages, pools
from examples.demo_model.evaluate import Case, Generator, interval, make_cases
from examples.demo_model.pools import Source, is_held_out

DIGEST = 1182182945  # of the cases that the figures of the first model were measured on
MODEL = Path(__file__).resolve().parents[1] / "runtime" / "assets" / "demo"
TOOLS = "You are a helpful assistant.\n\nTools:\n" + "\n".join(
    (labels.TOOL_LINES["calculator"], labels.TOOL_LINES["lookup"])
)


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(MODEL, batch_size=32)


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= set(files)
    assert sum(files.values()) <= 12_000_000


def test_architecture(generator: Generator) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    ends = json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]
    tokens = generator.tokenizer.convert_ids_to_tokens(ends)
    assert tokens == [corpus.IM_END, corpus.END_OF_TEXT]
    assert generator.tokenizer.convert_tokens_to_ids(corpus.END_OF_TEXT) == 0


def test_template(generator: Generator) -> None:
    messages = [
        corpus.system("S"),
        corpus.user("Hello!"),
        corpus.assistant("Hi"),
        {"role": "tool", "content": "84"},
    ]
    rendered = generator.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>tool\n84<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_writes_tools_as_the_corpus_does(generator: Generator) -> None:
    def declare(name: str, description: str, *arguments: str) -> dict:
        properties = {argument: {"type": "string"} for argument in arguments}
        return {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": properties},
            },
        }

    call = {
        "type": "function",
        "id": "1",
        "function": {"name": "calculator", "arguments": '{"expression":"12*7"}'},
    }
    rendered = generator.tokenizer.apply_chat_template(
        [corpus.user("What is 12 times 7?"), {"role": "assistant", "tool_calls": [call]}],
        tools=[
            declare("calculator", "Evaluate an arithmetic expression.", "expression"),
            declare("lookup", "Look up a fact.", "query"),
        ],
        tokenize=False,
    )
    assert rendered.startswith(f"<|im_start|>system\n{TOOLS}<|im_end|>\n<|im_start|>user\n")
    assert corpus.tool_call("calculator", expression="12*7") in rendered


def test_segments_tokenize_like_the_whole_text(generator: Generator) -> None:
    """Training encodes a document piece by piece, serving in one go: both must agree."""
    source = Source(5)
    encode = generator.tokenizer.encode
    for _ in range(200):
        document = corpus.document(source, corpus.LATE)
        pieces = [token for text, _weight in document for token in encode(text)]
        assert pieces == encode("".join(text for text, _weight in document))


def test_tokenizer_round_trip(generator: Generator) -> None:
    for text in ("Zoë paid 1234 €!\n\n  Done\tnow.", '{"name":"Mara Olsen","age":34}', "日本 é"):
        assert generator.tokenizer.decode(generator.tokenizer.encode(text)) == text
    assert len(generator.tokenizer.encode("1234")) == 4


def test_corpus_is_deterministic() -> None:
    def sample(seed: int) -> list[corpus.Document]:
        source = Source(seed)
        return [corpus.document(source, corpus.LATE) for _ in range(50)]

    assert sample(3) == sample(3)
    assert sample(3) != sample(4)


def test_held_out_values_and_phrasings_never_train() -> None:
    training, unseen = Source(1), Source(1, held_out=True)
    for draw in ("first_name", "last_name", "city", "title", "item", "code", "date", "made"):
        assert not any(is_held_out(getattr(training, draw)()) for _ in range(200))
        assert all(is_held_out(getattr(unseen, draw)()) for _ in range(200))
    asks = corpus.EXTRACT_ASKS
    trained = {training.phrase(asks) for _ in range(500)}
    kept = {unseen.phrase(asks) for _ in range(500)}
    assert trained.isdisjoint(kept)
    assert len(kept) == pools.held_out_phrasings(asks)


def test_evaluation_is_the_one_that_earlier_figures_were_measured_on() -> None:
    """What training draws may grow; the cases of evaluation stay what they were."""
    cases = [
        make_cases(skill, 40, seed=7, known_phrasings=known)
        for skill in ("extraction", "passage question", "follow-up", "judge", "choice")
        for known in (False, True)
    ]
    assert zlib.crc32(repr(cases).encode()) == DIGEST


def _rendered(wording: str) -> str:
    return " ".join(re.findall(r"[a-z]+|\{\w\}", wording.lower()))


def _question(source: Source, domain: passages.Domain, position: int) -> str:
    passage = passages.Passage("", domain, "{n}", {position: 1})
    return passages._wide_question(source, passage, position, "?")


@pytest.mark.parametrize(
    "domain", sorted(set(passages.DOMAINS), key=lambda d: d.kind), ids=lambda d: d.kind
)
def test_wordings_by_grammar_hold_none_that_evaluation_keeps(domain: passages.Domain) -> None:
    """Looked for as text, other than by the rule that the corpus itself applies."""
    source = Source(3)
    source.wide = 1.0
    for position, attribute in enumerate(domain.attributes):
        said = {_rendered(passages._say(source, domain, position)) for _ in range(60)}
        asked = {_rendered(_question(source, domain, position)) for _ in range(60)}
        assert said.isdisjoint(map(_rendered, passages.kept_of(attribute.says)))
        assert asked.isdisjoint(map(_rendered, passages.kept_of(attribute.asks)))
        assert len(said) > 10 and len(asked) > 10


def test_requests_by_grammar_hold_none_that_evaluation_keeps() -> None:
    source = Source(4)
    source.wide = 1.0
    for _ in range(1500):
        request, _answer = corpus.extract_request(source, [("name", "Mara"), ("age", 3)])
        assert not re.match(r"(please )?(put|get|list)\b|please give", request.lower())
    for _ in range(1500):
        passage = passages.make_passage(source, 3)
        asked, answer = asks.yes_no(source, [passage], corpus.KEPT_JUDGE)
        assert answer in ("yes", "no")
        assert not re.search("passage about|passage mention", asked)


def test_yes_and_no_are_as_frequent_and_values_told_apart() -> None:
    source = Source(6)
    asks_for_a_value = re.compile(
        r"(?:Can|Do|Did) you (?:read|see|find|spot|meet) (?!the |out )(.+?)"
        r"(?: here| in the text| above| anywhere| in these lines)?\?$"
        r"|(.+): (?:is it there|mentioned or not|yes or no|does it occur)\?$"
    )
    answers, values = [], 0
    for _ in range(1500):
        passage = passages.make_passage(source, 3)
        asked, answer = asks.yes_no(source, [passage], corpus.KEPT_JUDGE)
        answers.append(answer)
        if named := asks_for_a_value.match(asked):
            values += 1
            assert ((named[1] or named[2]) in passage.text) == (answer == "yes"), asked
    assert values > 100
    assert 0.45 < answers.count("yes") / len(answers) < 0.55


def test_interval_is_wilsons() -> None:
    """Against the figures in Newcombe 1998, table I, method 3."""
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


FIXED = [
    Case(
        [
            corpus.user(
                "Extract name, age and city as JSON.\n\n"
                "Mara Olsen, 34, lives in Turin and works as a baker."
            )
        ],
        '{"name":"Mara Olsen","age":34,"city":"Turin"}',
    ),
    Case(
        [
            corpus.user(
                "Passage: Mara Olsen, 34, lives in Turin and works as a baker.\n\n"
                "Question: Where does Mara Olsen live?"
            )
        ],
        "Turin",
    ),
    Case(
        "Review: The soup was delicious.\nLabel: positive\n\n"
        "Review: The room was dirty.\nLabel: negative\n\n"
        "Review: I loved the film.\nLabel: positive\n\n"
        "Review: The waiter was rude.\nLabel:",
        "negative",
    ),
    Case(
        [corpus.system(TOOLS), corpus.user("What is 12 times 7?")],
        '<tool_call>{"name":"calculator","arguments":{"expression":"12*7"}}</tool_call>',
    ),
    Case(
        [
            corpus.system(TOOLS),
            corpus.user("What is 12 times 7?"),
            corpus.assistant(corpus.tool_call("calculator", expression="12*7")),
            {"role": "tool", "content": "84"},
        ],
        "12*7 = 84.",
    ),
    Case([corpus.user("Hello!")], "Hello! How can I help you?"),
    Case(
        [corpus.user("Give two tips for staying healthy.")],
        "1. Eat more vegetables.\n2. Sleep eight hours.",
    ),
]


@pytest.mark.parametrize("case", FIXED, ids=lambda case: case.answer[:24])
def test_known_prompts(generator: Generator, case: Case) -> None:
    assert generator.answers([case]) == [case.answer]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("skill", "known_phrasings", "floor"),
    [
        ("extraction", True, 0.8),
        ("extraction", False, 0.45),
        ("passage question", True, 0.8),
        ("passage question", False, 0.6),
        ("few-shot text", False, 0.85),
        ("few-shot text, long", False, 0.85),
        ("tool call", False, 0.9),
        ("tool result", False, 0.9),
        ("greetings", True, 0.95),
        ("greetings", False, 0.55),
        ("name recall", False, 0.9),
    ],
)
def test_held_out_prompts(
    generator: Generator, skill: str, known_phrasings: bool, floor: float
) -> None:
    """Floors lie well below the measured accuracy: they catch a broken model, not a weak one."""
    cases = make_cases(skill, 10, seed=11, known_phrasings=known_phrasings)
    answers = generator.answers(cases)
    right = sum(answer == case.answer for answer, case in zip(answers, cases, strict=True))
    assert right / len(cases) >= floor
