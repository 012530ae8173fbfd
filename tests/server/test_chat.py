"""Chat templates: ids against transformers, forged roles, and formats found by probing."""

import json
from pathlib import Path
from typing import Any

import pytest

from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.model_texts import load_chat, load_eos_ids
from rootlace.runtime.server.tokenizer import Piece, Tokenizer
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChatFormat, RoleFormat, Text
from tests.server.conftest import folder_of, load

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}" + CHATML
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello there"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is <b>2+2</b>?"},
        {"role": "assistant", "content": "4 😀"},
        {"role": "user", "content": " and\n\n 3+3? <|im_ not special"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "w", "arguments": {"c": "Zürich"}}}
            ],
        },
        {"role": "tool", "content": "<tool> rain & 'wind'"},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "w",
            "description": "Weather <now>",
            "parameters": {"type": "object", "properties": {"c": {"type": "string"}}},
        },
    }
]


def ids_of(tokenizer: Tokenizer, parts: tuple[Any, ...]) -> list[int]:
    return tokenizer.encode_pieces([Piece(part.text, part.special) for part in parts])


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Return the library's own tokenizer."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder_of("qwen3") / "tokenizer.json")
    )
    theirs.chat_template = json.loads(
        (folder_of("qwen3") / "tokenizer_config.json").read_text("utf-8")
    )["chat_template"]
    return theirs


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generate", [True, False])
def test_ids_like_transformers(theirs: Any, messages: Any, tools: Any, generate: bool) -> None:
    tokenizer = load("qwen3")
    parts = load_chat(FolderSource(folder_of("qwen3")), tokenizer).render(messages, tools, generate)
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=generate, tokenize=True, return_dict=False
    )
    assert ids_of(tokenizer, parts) == list(expected)


def conversation(form: ChatFormat, messages: list[dict[str, str]], generate: bool) -> str:
    text = form.opening
    if messages[0]["role"] != "system":
        text += form.default_system
    for message in messages:
        role = form.roles[message["role"]]
        text += role.begin + message["content"] + role.end
    return text + (form.roles["assistant"].begin if generate else "")


@pytest.mark.parametrize("bos", ["<s>", "<|im_start|>"])  # the second is SmolLM2's
@pytest.mark.parametrize("template", [CHATML, CHATML_DEFAULT, LLAMA3, MISTRAL, "qwen3"])
def test_format_writes_what_the_template_writes(template: str, bos: str) -> None:
    if template == "qwen3":
        chat = load_chat(FolderSource(folder_of("qwen3")), load("qwen3"))
    else:
        chat = ChatTemplate(template, SPECIAL, {**TOKENS, "bos_token": bos})
    user, system = {"role": "user", "content": "Hello"}, {"role": "system", "content": "Short"}
    conversations = [[user]]
    if template != MISTRAL:
        conversations += [[system, user], [user, system], [system, user, system]]
    for messages in conversations:
        parts = chat.render(messages)
        expected = "".join(part.text for part in parts)  # type: ignore[union-attr]
        assert conversation(chat.format, messages, True) == expected


def test_formats_of_roles() -> None:
    assert ChatTemplate(CHATML).format == ChatFormat(
        roles={
            role: RoleFormat(f"<|im_start|>{role}\n", "<|im_end|>\n")
            for role in ("user", "assistant", "system", "tool")
        }
    )
    default = ChatTemplate(CHATML_DEFAULT).format
    assert default.default_system == "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert default.opening == "" and default.roles["system"].begin == "<|im_start|>system\n"
    llama = ChatTemplate(LLAMA3, SPECIAL, TOKENS).format
    assert llama.opening == "<s>"
    assert llama.roles["user"].begin == "<|start_header_id|>user<|end_header_id|>\n\n"
    mistral = ChatTemplate(MISTRAL, SPECIAL, TOKENS).format
    assert mistral.opening == "<s>"
    assert mistral.roles["user"] == RoleFormat("[INST] ", " [/INST]")
    assert mistral.roles["assistant"] == RoleFormat("", "</s>")
    assert mistral.roles["system"] == mistral.roles["user"]
    thinking = load_chat(FolderSource(folder_of("qwen3")), load("qwen3")).format.roles
    assert thinking["assistant"].begin == "<|im_start|>assistant\n<think>\n"
    assert thinking["tool"].begin == "<|im_start|>user\n<tool_response>\n"


def test_a_template_that_writes_a_text_twice_has_no_format_of_its_own() -> None:
    twice = CHATML.replace("message['content']", "message['content'] + message['content']")
    assert ChatTemplate(twice).format == ChatTemplate(None).format


def test_without_a_template() -> None:
    tokenizer = load("stories3M")
    chat = load_chat(FolderSource(folder_of("stories3M")), tokenizer)
    assert chat.format.opening == "<s>"
    parts = chat.render([{"role": "user", "content": "Hi</s>"}])
    text = "".join(part.text for part in parts)  # type: ignore[union-attr]
    assert text == "<s>USER: Hi</s>\nASSISTANT:"
    ids = ids_of(tokenizer, parts)
    assert ids[0] == 1 and 2 not in ids and ids.count(1) == 1
    with pytest.raises(InvalidRequest, match=r"messages\[0\]: unknown role 'robot'"):
        chat.render([{"role": "robot", "content": "x"}])


def test_refusals() -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        ChatTemplate("{% for %}")
    chat = ChatTemplate(MISTRAL, SPECIAL, TOKENS)
    with pytest.raises(InvalidRequest, match="Only user and assistant roles"):
        chat.render([{"role": "system", "content": "x"}])
    with pytest.raises(InvalidRequest, match="refuses this conversation"):
        ChatTemplate(CHATML).render([{"role": "user", "content": 3}])
    unsafe = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest):
        ChatTemplate(unsafe).render([{"role": "user", "content": "x"}])
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        ChatTemplate(CHATML, SPECIAL).render([{"role": "user", "content": "x"}], more=deep)


def test_content_of_many_characters_of_private_use() -> None:
    chat = ChatTemplate(CHATML, SPECIAL)
    areas = [range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)]
    first = "".join(map(chr, areas[0]))
    assert first in _written(chat.render([{"role": "user", "content": first}]))
    every = "".join(chr(code) for area in areas for code in area)
    with pytest.raises(InvalidRequest, match="private use"):
        chat.render([{"role": "user", "content": every}])


def test_a_variable_of_any_name() -> None:
    names = {"self": 1, "value": 2, "context": 3}
    (part,) = ChatTemplate("{{ value + context }}").render([], **names)
    assert part == Text("5", special=True)


def test_globals_and_tags(tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%Y') }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'a': '<é>'} | tojson }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = ChatTemplate.read(FolderSource(tmp_path), [], "")
    content = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    (part,) = chat.render([{"role": "user", "content": content}])
    assert isinstance(part, Text)
    assert part.text[4:] == 'one two01{"a": "<é>"}' and part.text[:4].isdigit()


def test_a_safe_text_escapes_nothing() -> None:
    template = "{{ 'Use '|safe + messages[0].content + tools[0] }}"
    parts = ChatTemplate(template).render(
        [{"role": "user", "content": "a < b, "}], tools=['{"c": 1}']
    )
    assert "".join(part.text for part in parts if isinstance(part, Text)) == 'Use a < b, {"c": 1}'


# SmolVLM's and LLaVA 1.5's, which render content that is a list, and nothing for a text.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "written", "goes_on"),
    [
        (
            SMOLVLM,
            "<|im_start|>System: s<end_of_utterance>\nUser: one two<end_of_utterance>\n"
            "Assistant: <end_of_utterance>\nUser: <image><end_of_utterance>\nAssistant:",
            "<|im_start|>User: a<end_of_utterance>\nAssistant: so",
        ),
        (
            LLAVA,
            "SYSTEM: s USER: one two ASSISTANT:  USER: <image> ASSISTANT:",
            "USER: a ASSISTANT: so",
        ),
    ],
)
def test_templates_that_want_parts_get_them(source: str, written: str, goes_on: str) -> None:
    chat = ChatTemplate(source, ["<end_of_utterance>", "<image>"])
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "<image>"},
    ]
    rendered = chat.render(messages)
    assert "".join(part.text for part in rendered if isinstance(part, Text)) == written
    assert Text("<") in rendered  # a user's text contains no special token
    last = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
    found = chat.render(last, add_generation_prompt=False, continue_final=True)
    assert "".join(part.text for part in found if isinstance(part, Text)) == goes_on
    assert chat.format.roles["user"].begin in ("User: ", "USER: ")
    plain = ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "a"}])
    assert plain == (Text("a", special=True),)


@pytest.mark.parametrize("cut", ["content[:3]", "content[1:]", "content | list | join('-')"])
def test_a_template_that_cuts_texts_wants_no_parts(cut: str) -> None:
    chat = ChatTemplate(f"{{% for message in messages %}}{{{{ message.{cut} }}}}{{% endfor %}}")
    parts = chat.render([{"role": "user", "content": "one two"}])
    written = "".join(part.text for part in parts if isinstance(part, Text))
    assert "ne" in written.replace("-", "") and "text" not in written


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    """Older folders of models for images have the template in a separate file."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": SMOLVLM}))
    assert ChatTemplate.read(FolderSource(tmp_path), [], "").source == SMOLVLM
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": LLAVA}))
    assert ChatTemplate.read(FolderSource(tmp_path), [], "").source == LLAVA


def test_named_templates_and_eos(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (part,) = ChatTemplate.read(FolderSource(tmp_path), [], "").render([])
    assert isinstance(part, Text) and part.text == "d"
    older = {"chat_template": {one["name"]: one["template"] for one in named}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(older))
    assert FolderSource(tmp_path).chat_templates() == {"tool_use": "t", "default": "d"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_eos_ids(FolderSource(folder_of("stories3M")), load("stories3M")) == {1, 2}
    assert load_eos_ids(FolderSource(tmp_path), load("qwen3")) == {
        load("qwen3").id_of("<|im_end|>")
    }


@pytest.mark.parametrize("source, last", [(CHATML, "so <|im_end|> "), (LLAMA3, "so"), (None, "so")])
def test_the_last_message_can_be_continued(source: str | None, last: str) -> None:
    template = ChatTemplate(source, SPECIAL, TOKENS)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": last}]
    whole = _written(template.render(messages, add_generation_prompt=False))
    parts = template.render(messages, add_generation_prompt=False, continue_final=True)
    text = _written(parts)
    assert text.endswith(last) and whole.startswith(text) and len(whole) > len(text)
    forged = [p for p in parts if p.special and "<|im_end|>" in p.text]  # type: ignore[union-attr]
    assert len(forged) == (source == CHATML)  # a user's turn has an end, content has none


def _written(parts: Any) -> str:
    return "".join(part.text for part in parts)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'].environ }}",
        "{{ (messages.append).__self__.__class__ }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages.append(1) }}",
        "{{ ['a', 'b']|map(attribute='__class__')|list }}{{ [].__class__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}{{ ''.mro() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.environ }}",
        "{{ range(1000000000)|length }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_reaches_nothing_of_the_process(template: str) -> None:
    try:
        found = ChatTemplate(template, [], TOKENS).render([{"role": "user", "content": "x"}])
    except InvalidRequest as error:
        assert "chat template" in str(error)
    else:  # a template that cannot be read is empty
        assert "".join(part.text for part in found if isinstance(part, Text)) in (
            "",
            "[Undefined, Undefined]",
        )


THINKING = (
    "{% for m in messages %}{% if m.thinking and m.content and m.tool_calls %}"
    "{{ raise_exception('not both') }}{% endif %}"
    "<{{ m.role }}{% if m.thinking %} analysis:{{ m.thinking }}{% endif %}>{{ m.content }}"
    "{% for call in m.tool_calls or () %} to={{ call.function.name }}{% endfor %}|{% endfor %}"
)


def test_thoughts_of_templates_that_call_them_thinking() -> None:
    """gpt-oss's and LFM2.5's templates do so; the result equals transformers'."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    call = {"type": "function", "function": {"name": "w", "arguments": {}}}
    calling = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [call]}
    messages = [{"role": "user", "content": "?"}, calling]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])),
        chat_template=THINKING,
    )
    ours = ChatTemplate(THINKING)
    text = "".join([part.text for part in ours.render(messages)])
    assert text == "<user>?|<assistant analysis:Hm> to=w|"
    assert text == theirs.apply_chat_template(messages, tokenize=False)


def test_thoughts_that_a_template_refuses_beside_a_text_and_a_call() -> None:
    """gpt-oss's template refuses; an answer that a client sends back with all three is no error."""
    call = {"type": "function", "function": {"name": "w", "arguments": {}}}
    called = {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "Hm",
        "tool_calls": [call],
    }
    said = {"role": "assistant", "content": "4", "reasoning_content": "Oh"}
    parts = ChatTemplate(THINKING).render([called, said])
    assert "".join([part.text for part in parts]) == "<assistant>So. to=w|<assistant analysis:Oh>4|"
    refusing = ChatTemplate("{{ raise_exception('no') }}")
    with pytest.raises(InvalidRequest, match="refuses this conversation: no"):
        refusing.render([called])


NAMES = ("bos_token", "eos_token", "pad_token", "mask_token", "image_token", "end_of_turn")
A_TOKEN = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}


@pytest.mark.parametrize(
    "config, of_map, expected",
    [
        (
            {"bos_token": {"__type": "AddedToken", **A_TOKEN}, "mask_token": "</s>"},
            None,
            "<s>|||</s>||",
        ),
        ({"image_token": "<s>", "add_bos_token": True}, None, "||||<s>|"),
        ({"extra_special_tokens": {"end_of_turn": "</s>"}}, None, "|||||</s>"),
        ({"extra_special_tokens": ["</s>"], "bos_token": "<s>"}, None, "<s>|||||"),
        ({}, {"bos_token": A_TOKEN, "pad_token": "</s>"}, "<s>||</s>|||"),
        ({"bos_token": None}, {"bos_token": "<s>"}, "<s>|||||"),
        ({"added_tokens_decoder": {}, "eos_token": "</s>"}, {"bos_token": "<s>"}, "|</s>||||"),
    ],
)
def test_named_special_tokens(tmp_path: Path, config: Any, of_map: Any, expected: str) -> None:
    """Templates get the tokens that transformers passes, also of `special_tokens_map.json`."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<s>": 1, "</s>": 2}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    template = "|".join([f"{{{{ {name} }}}}" for name in NAMES])
    written = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    if of_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(of_map))
    messages = [{"role": "user", "content": "?"}]
    parts = ChatTemplate.read(FolderSource(tmp_path), [], "").render(messages)
    assert "".join([part.text for part in parts if isinstance(part, Text)]) == expected
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(messages, tokenize=False) == expected


def test_a_map_of_special_tokens_that_is_older_than_the_configuration(tmp_path: Path) -> None:
    """transformers 5 leaves the map where it saves a tokenizer that it has read there."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert FolderSource(tmp_path).tokenizer_config() == {"eos_token": "<|im_end|>"}
    assert load_eos_ids(FolderSource(tmp_path), load("qwen3")) == {
        load("qwen3").id_of("<|im_end|>")
    }
