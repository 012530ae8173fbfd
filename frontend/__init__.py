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

if TYPE_CHECKING:
    from rootlace.client.endpoint import (
        RuntimeEndpoint,
        flush_cache,
        get_server_info,
        set_default_backend,
    )
    from rootlace.client.runtime import Runtime
    from rootlace.client.services import AnthropicBackend, LiteLLMBackend, OpenAIBackend
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
    from rootlace.language.state import AsyncProgramState, Forks, ProgramState, State
    from rootlace.language.tools import Tool, Tools, mcp_tools, tools
    from rootlace.program.batch import Checkpoint
    from rootlace.program.engine import Engine
    from rootlace.program.function import Function, function
    from rootlace.timeline import Timeline
    from rootlace.trace import Trace
    from rootlace.wire.errors import RootlaceError
    from rootlace.wire.sampling import Cache

    __version__: str

# Public names, by the module that has them: it is imported at their first use.
_NAMES = {
    "client.endpoint": "RuntimeEndpoint flush_cache get_server_info set_default_backend",
    "client.runtime": "Runtime",
    "client.services": "AnthropicBackend LiteLLMBackend OpenAIBackend",
    "language.control": "beam best_of majority",
    "language.expressions": (
        "ChoicesMethod assistant assistant_begin assistant_end gen gen_int gen_string "
        "greedy_token_selection ids image select system system_begin system_end "
        "token_length_normalized tool tool_begin tool_end unconditional_likelihood_normalized "
        "user user_begin user_end"
    ),
    "language.failures": "ProgramError",
    "language.state": "AsyncProgramState Forks ProgramState State",
    "language.tools": "Tool Tools mcp_tools tools",
    "program.batch": "Checkpoint",
    "program.engine": "Engine",
    "program.function": "Function function",
    "timeline": "Timeline",
    "trace": "Trace",
    "wire.errors": "RootlaceError",
    "wire.sampling": "Cache",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

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
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"rootlace.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
