"""Rootlace: LLM programs laced over one root.

    import rootlace as rl

    @rl.function
    def qa(s, question):
        s += "Q: " + question + "\\nA:" + rl.gen("answer", stop="\\n")

    with rl.Runtime(model="path/to/model") as runtime:
        print(qa.run("Who are you?", backend=runtime)["answer"])

Importing it is cheap: sockets, event loops and backends come with their first use, and the
runtime's heavy packages stay in the runtime's own processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rootlace.language.async_state import AsyncProgramState
from rootlace.language.control import beam, best_of, majority
from rootlace.language.expressions import (
    ChoicesMethod,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    ids,
    image,
    select,
    system,
    system_begin,
    system_end,
    token_length_normalized,
    tool,
    tool_begin,
    tool_end,
    unconditional_likelihood_normalized,
    user,
    user_begin,
    user_end,
)
from rootlace.language.failures import ProgramError
from rootlace.language.state import ProgramState, State
from rootlace.language.tools import Tool, Tools, tools
from rootlace.program.function import Function, function
from rootlace.wire.errors import RootlaceError
from rootlace.wire.sampling import Cache

if TYPE_CHECKING:
    from rootlace.client.anthropic_backend import AnthropicBackend
    from rootlace.client.default import flush_cache, get_server_info, set_default_backend
    from rootlace.client.endpoint import RuntimeEndpoint
    from rootlace.client.litellm_backend import LiteLLMBackend
    from rootlace.client.openai_backend import OpenAIBackend
    from rootlace.client.runtime import Runtime
    from rootlace.language.fork import Forks
    from rootlace.language.mcp_tools import mcp_tools
    from rootlace.program.batch import Checkpoint
    from rootlace.program.engine import Engine
    from rootlace.timeline.spans import Timeline
    from rootlace.trace.tracer import Trace

    __version__: str

_LAZY = {
    "AnthropicBackend": "rootlace.client.anthropic_backend",
    "LiteLLMBackend": "rootlace.client.litellm_backend",
    "Checkpoint": "rootlace.program.batch",
    "Engine": "rootlace.program.engine",
    "OpenAIBackend": "rootlace.client.openai_backend",
    "Forks": "rootlace.language.fork",
    "Runtime": "rootlace.client.runtime",
    "RuntimeEndpoint": "rootlace.client.endpoint",
    "Timeline": "rootlace.timeline.spans",
    "Trace": "rootlace.trace.tracer",
    "flush_cache": "rootlace.client.default",
    "mcp_tools": "rootlace.language.mcp_tools",
    "get_server_info": "rootlace.client.default",
    "set_default_backend": "rootlace.client.default",
}

__all__ = [
    "AnthropicBackend",
    "AsyncProgramState",
    "Cache",
    "Checkpoint",
    "ChoicesMethod",
    "Engine",
    "Forks",
    "Function",
    "LiteLLMBackend",
    "OpenAIBackend",
    "ProgramError",
    "ProgramState",
    "RootlaceError",
    "Runtime",
    "RuntimeEndpoint",
    "State",
    "Timeline",
    "Tool",
    "Tools",
    "Trace",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "beam",
    "best_of",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "ids",
    "image",
    "majority",
    "mcp_tools",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "tool",
    "tool_begin",
    "tool_end",
    "tools",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rootlace")
    from importlib import import_module

    if name == "testing":
        return import_module("rootlace.testing")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
