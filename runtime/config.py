"""Configuration: one frozen dataclass per part, passed in; nothing reads the environment.

A field that users may set is an `option`, stated once: type, range and default are the field's own.
The keywords of `rootlace.Runtime` and the options of `rootlace serve` follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, json


@dataclass(frozen=True)
class Option:
    """Names and help of a field that users set.

    `keyword` is its name for `rootlace.Runtime` ("": the field's), `aliases` are sglang's names,
    and `opposite` is sglang's name for the reverse. `help` is its text on the command line ("": no
    such option); `flag` is its name there ("": `--` and the keyword; a `--no-...` turns it off).
    `shown` is the default in the help where it is not the field's. A `size` is written like 512M on
    the command line.
    """

    help: str = ""
    keyword: str = ""
    flag: str = ""
    shown: str = ""
    aliases: tuple[str, ...] = ()
    opposite: str = ""
    size: bool = False


def option(default: Any, help: str = "", **details: Any) -> Any:
    """Return a dataclass field that is an option. `details` are those of `Option`."""
    return field(default=default, metadata={"option": Option(help, **details)})


@dataclass(frozen=True)
class Setting:
    """An option of a configuration: its `path` leads through nested configurations to the field.

    `default` is the field's; None for a field that has none, which is `required`.
    """

    keyword: str
    path: tuple[str, ...]
    type: Any
    default: Any
    required: bool
    option: Option

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the setting in `rootlace.Runtime`."""
        opposite = (self.option.opposite,) if self.option.opposite else ()
        return (self.keyword, *self.option.aliases, *opposite)

    def put(self, config: dict[str, Any], value: Any) -> None:
        """Write `value` at the setting's place in `config`, a configuration as nested dicts."""
        *path, last = self.path
        for part in path:
            config = config.setdefault(part, {})
        config[last] = value


def settings(config: type, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yield every option of the dataclass `config` and of its inner configurations, in order."""
    types = get_type_hints(config, include_extras=True)
    for each in fields(config):
        place = (*path, each.name)
        if is_dataclass(types[each.name]):
            yield from settings(types[each.name], place)
        elif (declared := each.metadata.get("option")) is not None:
            keyword = declared.keyword or each.name
            required = each.default is MISSING
            default = None if required else each.default
            yield Setting(keyword, place, types[each.name], default, required, declared)


# Ranges are checked where a configuration is received; the error names the value that is wrong.
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Gigabytes = Annotated[float, Meta(gt=0, le=1e9)]
"""Unit of 10^9 bytes."""
Port = Annotated[int, Meta(ge=0, le=65535)]

Policy = Literal["lpm", "fcfs", "dfs"]
KVDtype = Literal["auto", "fp8_e4m3", "int8", "int4"]
Eviction = Literal["lru", "lfuda"]
"""The names of `cache.node.POLICIES`."""
SPECULATION_TOKENS = 1 << 18
"""`speculation_tokens` where drafts change no bit: with native kernels."""
OWN_CONFIGS = ("auto", "none")
"""Values of `GatewayConfig.generation_config` other than a path."""


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool and its tree. `num_blocks=None` lets the executor size it from free memory."""

    block_size: Positive = option(16, "Token slots per KV block.", aliases=("page_size",))
    num_blocks: Positive | None = option(
        None, "Blocks in the KV pool.", flag="--kv-blocks", shown="by memory"
    )
    enabled: bool = option(
        True,
        "Do not reuse any prefix.",
        keyword="cache",
        flag="--no-cache",
        opposite="disable_radix_cache",
    )
    """False: nothing is matched and nothing kept (for measurements)."""
    eviction: Eviction = option("lru", "Order in which cached prefixes are given up.")
    max_pinned: Annotated[float, Meta(ge=0, le=1)] = option(
        0.5, "Share of the KV pool that clients may pin."
    )
    host_gb: Gigabytes | None = option(
        None,
        "Main memory for what the KV pool has no room for; outlives a killed engine.",
        keyword="cache_host_gb",
        shown="none",
    )
    disk: str = option(
        "",
        "Folder that keeps what the KV pool has no room for, and what the next start finds.",
        keyword="cache_disk",
        shown="none",
    )
    disk_gb: Gigabytes = option(16.0, "What they take there at most.", keyword="cache_disk_gb")
    disk_hourly_gb: Gigabytes | None = option(
        None,
        "What is written there in an hour at most.",
        keyword="cache_disk_hourly_gb",
        shown="as much as --cache-disk-gb",
    )

    @property
    def tiered(self) -> bool:
        """Whether there is to be something below the KV pool."""
        return self.enabled and bool(self.disk or self.host_gb)


@dataclass(frozen=True)
class SchedulerConfig:
    """Iteration-level scheduling.

    `max_step_tokens` bounds the tokens computed in one step (decode rows count one each),
    `step_seconds` its expected duration (None, without a device that says better: unbounded),
    `max_running` the rows, `max_waiting` the queue (beyond it a request is refused as overloaded).
    A waiting request may be overtaken by `max_overtaken` later ones, and by more as long as their
    work is at most `max_delay` times what was waiting when it came (docs/simulation.md). Among
    priorities, one step is worth `priority_seconds` of waiting.
    """

    max_step_tokens: Positive = option(
        2048, "Tokens computed in one step at most.", aliases=("chunked_prefill_size",)
    )
    step_seconds: Seconds | None = option(
        None,
        "What a step should take at most, as measured: prompts are cut; 0: whatever it takes.",
        shown="0.25 on a CPU, 0 on a GPU",
    )
    speculation_tokens: NotNegative | None = option(
        None,
        "Tokens of recent text in which repetitions are looked for, to be computed ahead; 0: none.",
        shown=f"{SPECULATION_TOKENS} with native kernels, 0 elsewhere",
    )
    max_running: Positive = option(
        256, "Requests in one step at most.", aliases=("max_running_requests",)
    )
    max_waiting: NotNegative = option(16384, "Requests in the queue; beyond it clients get 429.")
    policy: Policy = option("lpm", "Order of waiting requests.", aliases=("schedule_policy",))
    max_overtaken: int = option(16)
    max_delay: Annotated[float, Meta(ge=0)] = option(0.25)
    priority_seconds: Seconds = option(
        10.0, "Seconds of waiting that a request's priority is worth, for each step of it."
    )
    stream_rate: Annotated[float, Meta(gt=0)] = option(
        3000.0, "Pieces of all streams together in a second; more streams get longer ones."
    )
    """Bound of the streams' pieces where `GatewayConfig.stream_interval` is not 0. A piece costs
    the gateway about the same for any number of tokens."""
    check_invariants: bool = option(False, "Check the tree after every step (slow).")


@dataclass(frozen=True)
class ExecutorConfig:
    """Model execution. `dtype="auto"` takes the checkpoint's; on a CPU that multiplies codes faster
    so, bfloat16 for quantised weights.

    `context_length` shortens the context; with `longrope` one beyond the original context, which is
    the default there, is served by the other set of factors, for texts of every length.
    """

    model: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Weights and KV cache; auto: as stored, quantised ones in bfloat16 where faster."
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    tensor_parallel: Positive = option(
        1,
        "Processes that divide each layer of the model; on GPUs each has one.",
        aliases=("tp_size",),
    )
    threads: Positive | None = option(None, "CPU threads of the engine, of all its ranks together.")
    context_length: Positive | None = option(
        None, "Context window; by default the model's, with longrope the original one."
    )
    kv_memory_bytes: Positive | None = option(
        None, "Memory of the KV pool, such as 512M or 4G.", flag="--kv-memory", size=True
    )
    kv_dtype: KVDtype = option(
        "auto",
        "KV cache; auto: the weights' type; fp8_e4m3, int8: half of bfloat16; int4: 0.3 of it.",
        aliases=("kv_cache_dtype",),
    )
    """"auto": that of the model. "fp8_e4m3": a byte per element, scaled per layer and head. "int8":
    integers, scaled per token and head; "int4": per 32 of its numbers."""
    allow_pickle: bool = option(
        False, "Read pytorch_model.bin where there is no safetensors file: tensors, and no code."
    )
    ignore_config_keys: tuple[str, ...] = option(
        (),
        "Keys of config.json that nobody knows and that change nothing, separated by commas; a key "
        "that is known to matter is refused all the same.",
    )
    quantize: Literal["none", "int8", "int4"] = option(
        "none", "Round weights while they are read: to int8 or to int4, in groups of 32."
    )
    weight_cache: str = option(
        "",
        "Folder for weights as the native kernels pack them, which the next start maps; or off.",
        shown="~/.cache/rootlace/weights",
    )
    weight_cache_bytes: Positive | None = option(
        None,
        "What that folder takes at most, such as 40G; what was not used for longest is deleted.",
        flag="--weight-cache-size",
        shown="a quarter of the free disk",
        size=True,
    )
    kernels: Literal["auto", "native", "reference"] = option(
        "auto", "On a CPU: native ones are compiled when first needed; auto is that if it can be."
    )
    """"native": compiled for this CPU when first needed; "auto": native where that is possible."""
    reference_for: tuple[str, ...] = option(
        (),
        "On a GPU: operations that the reference computes instead of Triton's kernels, such as "
        "attention or sampling; may be given several times.",
    )
    adapters: tuple[str, ...] = option(
        (),
        "A LoRA adapter (PEFT's folder) as NAME=PATH; may be given several times.",
        flag="--adapter",
        aliases=("lora_paths",),
    )
    draft_model: str = option(
        "",
        "A smaller model with the same tokenizer, or the folder of the model's EAGLE-3 head, which "
        "drafts tokens that the model checks; on a CPU with native kernels.",
        shown="none",
        aliases=("speculative_draft_model_path",),
    )
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the free main memory that this engine counts with, beside other engines."""
    cuda_graphs: bool = option(
        True,
        "Launch decode steps kernel by kernel.",
        flag="--no-cuda-graphs",
        opposite="disable_cuda_graph",
    )


@dataclass(frozen=True)
class ConstraintConfig:
    """Constraints: what runs them, and their limits.

    `backend="auto"` takes our automaton for regular constraints of modest size, and llguidance for
    the rest; "outlines_core" is for compatibility (regular constraints only). Compilation of one
    constraint ends with `InvalidConstraint` after `compile_memory_bytes`, and with
    `ServerUnavailable` after `compile_seconds` of a processor.
    `max_states` and `max_table_bytes` bound one automaton; beyond them llguidance takes over.
    At most `cache_size` grammars of about `cache_bytes` are kept for later requests.
    `max_retreats` bounds how often a check may roll back one request. Automata of at most
    `max_device_states` states and `max_device_bytes` of tables are stepped on the GPU itself.
    """

    backend: Literal["auto", "automaton", "llguidance", "outlines_core"] = option(
        "auto",
        "What runs constraints; auto is our automaton where it fits.",
        keyword="constraint_backend",
        aliases=("grammar_backend",),
    )
    jump_forward: bool = option(
        True, "Sample text that a constraint forces, too.", flag="--no-jump-forward"
    )
    cache_size: int = 256
    cache_bytes: int = 512 << 20
    max_source_bytes: int = 2**20
    compile_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 10.0
    compile_memory_bytes: int = 1 << 30
    compile_threads: int = 1
    mask_threads: int = 1
    max_states: int = 16384
    max_table_bytes: int = 64 << 20
    max_retreats: int = 64
    max_device_states: int = 4096
    max_device_bytes: int = 16 << 20


@dataclass(frozen=True)
class LogConfig:
    """Logs of both processes on standard error (`rootlace.runtime.processes`). `log_level=None`:
    the gateway's warnings, the sampling of requests, and the engine's messages on its computing."""

    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = option(
        None, "Least severe messages that are logged.", shown="warning; of the engine: info"
    )
    log_format: Literal["text", "json"] = option(
        "text", "Lines for people, or one JSON object per message."
    )


@dataclass(frozen=True)
class EngineConfig:
    """All of the engine process. `logs` holds for the gateway, too."""

    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    constraints: ConstraintConfig = field(default_factory=ConstraintConfig)
    overlap: bool | None = option(
        None,
        "Plan a step while the one before it runs.",
        flag="--overlap/--no-overlap",
        shown="on a GPU",
    )
    """None: only where the executor runs beside the host."""
    logs: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The gateway. `http_port=None`: no HTTP. Programs connect to `program_address` (ZeroMQ)."""

    model: str
    host: str = option("127.0.0.1", "Interface to listen on.")
    http_port: Port | None = option(
        None, "HTTP port; 0 takes a free one.", flag="--port", aliases=("port",)
    )
    program_address: str = option(
        MISSING, "Where programs connect, tcp:// or ipc://.", shown="tcp, port + 1"
    )
    api_key: str = option("", "Refuse clients that do not have this key.")
    keys_file: str = option(
        "",
        "File of API keys with names, quotas and namespaces: see `rootlace keys`.",
        flag="--keys",
        shown="none",
    )
    program_key: str = option(
        "",
        "File with the secret key that encrypts programs' connections; made if there is none.",
        shown="none: not encrypted",
    )
    cors_origins: str = option(
        "", "Origins of web pages that may ask, separated by commas; * for any.", shown="none"
    )
    allowed_hosts: str = option(
        "",
        "Names of this server, beside localhost, that clients without a key may use.",
        shown="none",
    )
    replicas: Annotated[int, Meta(ge=1, le=64)] = option(
        1, "Engine processes of each model, which share the cores, or have a GPU each."
    )
    disaggregate: Annotated[int, Meta(ge=0, le=63)] = option(
        0, "Of the replicas, so many that compute long prompts for the others.", shown="none"
    )
    disaggregate_from: Positive = option(
        512, "Tokens of a prompt, not cached, from which on it is computed for the others."
    )
    disaggregate_gb: Annotated[float, Meta(gt=0)] = option(
        1.0, "Main memory for prompts that are handed over, or each engine's."
    )
    disaggregate_by: Literal["memory", "tcp", "nixl"] = option(
        "memory", "How they are handed over: by shared memory, by TCP, or by NIXL, if it is there."
    )
    load: Literal["start", "on-demand"] = option(
        "start", "Load models when the server starts, or when they are first asked for."
    )
    idle_unload: Annotated[float, Meta(gt=0)] | None = option(
        None, "Seconds without use after which a model is unloaded.", shown="never"
    )
    tools: Literal["auto", "template-only"] = option(
        "auto", "Write tools that a chat template has no place for in own words, or refuse them."
    )
    generation_config: str = option(
        "auto",
        "The model's own sampling defaults: auto, as its files say; none; or a "
        "generation_config.json or the folder of one.",
    )
    default_sampling: tuple[str, ...] = option(
        (),
        "A default for requests that do not say otherwise, as KEY=VALUE, such as temperature=0.7; "
        "several with commas, or given several times; of several models NAME:KEY=VALUE for one.",
    )
    warm_up: bool = option(False, "Generate once before a model is ready, freely and by a schema.")
    served_name: str = option(
        "", "Name of the model for clients.", shown="the folder's", aliases=("served_model_name",)
    )
    files: str = option(
        "", "Folder that keeps uploaded files and batches; without it there are none.", shown="none"
    )
    state: str = option(
        "",
        "Folder that keeps programs' branches, responses, files and batches over a restart.",
        shown="none",
    )
    cache_reports: Literal["off", "own", "all"] = option(
        "own", "Whether clients are told why a prompt missed the cache."
    )
    """"own": as far as their own namespace shows it, with texts that others of it sent; "all": and
    whether other namespaces hold the prompt."""
    otlp: str = option(
        "", "OpenTelemetry collector (OTLP over HTTP) that gets a span per request.", shown="none"
    )
    stream_interval: Seconds = option(
        0.02, "Seconds between pieces of a stream, where tokens come faster."
    )
    """0: each token by itself. The first piece never waits."""
    hold_seconds: Seconds = option(
        300.0, "Seconds for which a response that may be gone on from leaves the cache last."
    )
    drain_seconds: Seconds = option(
        30.0, "Seconds after SIGTERM that running requests have to end; new ones get 503."
    )
    front_secret: str = ""
    """Secret of a trusted proxy: the gateway believes its word on a request's source."""
    max_connections: int = option(1024)
    max_http_connections: Positive | None = option(
        None,
        "Connections by HTTP; idle ones make room, what is beyond gets 503.",
        shown="half of the descriptors, at most 4096",
    )
    max_branches: int = option(65536)
    max_message_bytes: int = 64 * 2**20
    """Bound of a program's message."""
    max_body_bytes: Positive = option(
        16 * 2**20,
        "Bytes of a request by HTTP; files of batches have a bound of their own.",
        flag="--max-body",
        shown="16M",
        size=True,
    )
    max_receiving_bytes: Positive | None = option(
        None,
        "Bytes of all requests by HTTP that are being received; what is beyond gets 429.",
        flag="--max-bodies",
        shown="16 of the largest",
        size=True,
    )
    client_timeout: float = option(30.0)
    """Seconds of silence after which a program's connection counts as dead (programs ping)."""


@dataclass(frozen=True)
class RuntimeConfig:
    """All of a runtime: what the gateway process reads from its standard input."""

    gateway: GatewayConfig
    engine: EngineConfig = field(default_factory=EngineConfig)


def runtime_config(
    model: str, program_address: str, options: Mapping[str, Any], name: str = ""
) -> dict[str, Any]:
    """Return a `RuntimeConfig` as the gateway reads it from standard input: nested dictionaries.

    `options` are by keyword or sglang's name. Clients know the model as `name` unless an option
    says otherwise. Raises TypeError for an option that does not exist, msgspec's ValidationError
    for a value that is wrong.
    """
    config: dict[str, Any] = {
        "gateway": {"model": model, "program_address": program_address},
        "engine": {"executor": {"model": model}},
    }
    known = {name: setting for setting in settings(RuntimeConfig) for name in setting.names}
    for keyword, value in options.items():
        setting = known.get(keyword)
        if setting is None:
            close = get_close_matches(keyword, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"Runtime() got an unexpected keyword argument {keyword!r}{hint}")
        if value is None and setting.required:
            continue  # the default that the signature shows
        if isinstance(value, Path):
            value = str(value)
        if isinstance(value, Mapping):
            value = [f"{key}={one}" for key, one in value.items()]
        if keyword == setting.option.opposite:
            value = not value
        try:
            json.decode(json.encode(value), type=setting.type)  # as the server does
        except ValidationError as error:
            kinds = (setting.type, *get_args(setting.type))
            values = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
            hint = f" (there are {', '.join(map(repr, values[0]))})" if values else ""
            raise ValidationError(f"{keyword}: {error}{hint}") from None
        setting.put(config, value)
    if name and not config["gateway"].get("served_name"):
        config["gateway"]["served_name"] = name
    return config
