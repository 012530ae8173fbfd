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
    from rootlace.client.endpoint import RuntimeEndpoint as RuntimeEndpoint
    from rootlace.client.endpoint import flush_cache as flush_cache
    from rootlace.client.endpoint import get_server_info as get_server_info
    from rootlace.client.endpoint import set_default_backend as set_default_backend
    from rootlace.client.runtime import Runtime as Runtime
    from rootlace.client.services import AnthropicBackend as AnthropicBackend
    from rootlace.client.services import LiteLLMBackend as LiteLLMBackend
    from rootlace.client.services import OpenAIBackend as OpenAIBackend
    from rootlace.language.control import beam as beam
    from rootlace.language.control import best_of as best_of
    from rootlace.language.control import majority as majority
    from rootlace.language.expressions import ChoicesMethod as ChoicesMethod
    from rootlace.language.expressions import assistant as assistant
    from rootlace.language.expressions import assistant_begin as assistant_begin
    from rootlace.language.expressions import assistant_end as assistant_end
    from rootlace.language.expressions import gen as gen
    from rootlace.language.expressions import gen_int as gen_int
    from rootlace.language.expressions import gen_string as gen_string
    from rootlace.language.expressions import greedy_token_selection as greedy_token_selection
    from rootlace.language.expressions import ids as ids
    from rootlace.language.expressions import image as image
    from rootlace.language.expressions import select as select
    from rootlace.language.expressions import system as system
    from rootlace.language.expressions import system_begin as system_begin
    from rootlace.language.expressions import system_end as system_end
    from rootlace.language.expressions import token_length_normalized as token_length_normalized
    from rootlace.language.expressions import tool as tool
    from rootlace.language.expressions import tool_begin as tool_begin
    from rootlace.language.expressions import tool_end as tool_end
    from rootlace.language.expressions import (
        unconditional_likelihood_normalized as unconditional_likelihood_normalized,
    )
    from rootlace.language.expressions import user as user
    from rootlace.language.expressions import user_begin as user_begin
    from rootlace.language.expressions import user_end as user_end
    from rootlace.language.failures import ProgramError as ProgramError
    from rootlace.language.state import AsyncProgramState as AsyncProgramState
    from rootlace.language.state import Forks as Forks
    from rootlace.language.state import ProgramState as ProgramState
    from rootlace.language.state import State as State
    from rootlace.language.tools import Tool as Tool
    from rootlace.language.tools import Tools as Tools
    from rootlace.language.tools import mcp_tools as mcp_tools
    from rootlace.language.tools import tools as tools
    from rootlace.program.batch import Checkpoint as Checkpoint
    from rootlace.program.engine import Engine as Engine
    from rootlace.program.function import Function as Function
    from rootlace.program.function import function as function
    from rootlace.timeline import Timeline as Timeline
    from rootlace.trace import Trace as Trace
    from rootlace.wire.errors import RootlaceError as RootlaceError
    from rootlace.wire.sampling import Cache as Cache

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

__all__ = sorted([*_MODULE_OF, "__version__"])


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
