"""Lists of tools in programs: the text of the model's own template."""

from typing import Any

import pytest

from rootlace.runtime.assets import demo_model
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.tool_parsers.learnt import format_of
from rootlace.runtime.server.tool_parsers.listing import tool_format
from rootlace.wire.protocol import Text
from rootlace.wire.tool_calls import ToolFormat, write_list

QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nThe signatures:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nWrite:\\n<tool_call>\\n{\\"name\\": <name>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages[1:] %}{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content + '<|im_end|>\\n' }}{%- endfor %}"""

INDENTED = """{{- messages[0].content }}{%- if tools %}{{- '\\nFunctions:\\n' }}
{%- for tool in tools %}{{- tool.function | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}{{- '[END]' }}{%- for message in messages[1:] %}{{- message.content }}{%- endfor %}"""

BEFORE = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}{{- message.role + ': ' + message.content }}{%- endfor %}"""

CALLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"About {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}, "é": {}}},
        },
    }
    for name in ("first", "second", "third")
]


def demo() -> ChatTemplate:
    return ChatTemplate.read(FolderSource(demo_model()), (), "")


def rendered(template: ChatTemplate, tools: list[dict[str, Any]] | None) -> str:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    parts = template.render(messages, tools=tools, add_generation_prompt=False)
    return "".join(part.text for part in parts if isinstance(part, Text))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("source", [QWEN, INDENTED, None], ids=["qwen", "indented", "demo"])
def test_they_are_listed_as_the_template_does(source: str | None, count: int) -> None:
    template = demo() if source is None else ChatTemplate(source)
    form = tool_format(template, format_of(template))
    content = "Be brief." + "".join(text for text, _ in write_list(form, CALLS[:count]))
    usual = rendered(template, None)
    assert rendered(template, CALLS[:count]) == usual.replace("Be brief.", content)


@pytest.mark.parametrize("source", [BEFORE, "{{ raise_exception('no') }}", None])
def test_elsewhere_they_are_listed_in_our_words(source: str | None) -> None:
    template = ChatTemplate(source)
    form = tool_format(template, format_of(template))
    assert form == ToolFormat()
    call = '<tool_call>\n{"name": "the_name", "arguments": {"argument": "value"}}\n</tool_call>'
    assert call in form.after


def test_calls_are_written_as_the_model_has_learnt() -> None:
    form = tool_format(demo(), format_of(demo()))
    begin = form.begin + "add" + form.between
    assert (form.trigger, begin) == ("<tool_call>", '<tool_call>{"name":"add","arguments":')
    assert form.end == "}</tool_call>"
