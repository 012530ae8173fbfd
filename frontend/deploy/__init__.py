"""Rootlace on a Ray cluster, as an application of Ray Serve. Needs the extra `ray`.

    serve run rootlace.deploy:build model=Qwen/Qwen3-0.6B replicas=2

`rootlace.deploy:build` is also what a configuration of Serve names as its `import_path`; its `args`
are those of `app`.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from rootlace.runtime.config import RuntimeConfig, runtime_config, settings
from rootlace.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from ray.serve import Application

# Autoscaling --------------------------------------------------------------------------------------


SHRINK = 0.5
"""Fraction of both bounds below which an engine is removed."""


class ByQueueAndKV:
    """Autoscaling policy of Ray Serve; Serve applies the bounds and delays of its
    `AutoscalingConfig` to the result."""

    def __init__(self, waiting: float, kv: float) -> None:
        """Set the bounds: mean waiting requests per engine, mean used fraction of the KV pool."""
        self._waiting = waiting
        self._kv = kv

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        current = max(context.target_num_replicas, 1)
        return self.wanted(current, metrics.get("waiting", {}), metrics.get("kv", {})), {}

    def wanted(self, current: int, waiting: Mapping[Any, float], kv: Mapping[Any, float]) -> int:
        """Return the wanted number of engines, from each engine's waiting requests and used
        fraction of its pool. The result brings the means down to the bounds, with at most twice as
        many engines. It is one fewer if both are well below the bounds, and would stay below."""
        if not waiting or not kv:
            return current
        load = max(
            sum(waiting.values()) / len(waiting) / self._waiting,
            sum(kv.values()) / len(kv) / self._kv,
        )
        if load > 1:
            return math.ceil(current * min(load, 2.0))
        if load < SHRINK and load * current < current - 1:
            return current - 1
        return current


# Application --------------------------------------------------------------------------------------


T = TypeVar("T")

MORE_SECONDS = 30.0
"""Seconds that Serve waits beyond the drain time, while an engine writes to its disk."""
_OURS = {"min_replicas", "max_replicas", "policy"}
"""Keys that `autoscaling` refuses, because other arguments set them."""
_NOT_HERE = {
    "load": "each engine is by itself",
    "idle_unload": "each engine is by itself",
    "disaggregate": "write prefill: so many engines beside the replicas",
}

_Count = Annotated[int, Meta(ge=1)]


class _Arguments(msgspec.Struct, frozen=True):
    """Arguments of `app` that are checked by type."""

    model: str
    replicas: tuple[_Count, _Count]
    cpus: Annotated[float, Meta(gt=0, le=65536)]
    gpus: Annotated[float, Meta(ge=0, le=1024)]
    waiting: Annotated[float, Meta(gt=0, le=1e9)]
    kv: Annotated[float, Meta(gt=0, le=1)]
    autoscaling: dict[str, Any]
    surge: Annotated[int, Meta(ge=0, le=100)]
    prefill: Annotated[int, Meta(ge=0)]


def app(
    model: str,
    replicas: int | tuple[int, int] = 1,
    *,
    cpus: float = 1,
    gpus: float = 0,
    waiting: float = 4.0,
    kv: float = 0.8,
    autoscaling: Mapping[str, Any] | None = None,
    surge: int = 0,
    prefill: int = 0,
    **options: Any,
) -> Application:
    """Make a Serve application with `replicas` engines of `model`: a fixed number or a range. The
    range's number grows above a mean of `waiting` requests per engine, or of the fraction `kv` of
    used KV pool. `autoscaling` has further fields of Serve's `AutoscalingConfig`, such as its
    delays.

    Each engine has `cpus` cores, as many threads, and `gpus`. In an update Serve replaces a fifth
    of the engines at a time, at least one; with `surge`, in percent, it first starts new ones.
    `prefill` further engines compute long prompts for the others; `disaggregate_by` is TCP or NIXL.
    `options` are those of `rootlace.Runtime`; every node can read the model, a folder or name.
    Programs connect to `program_address`, in which NODE is the address of the gateway's node.

    Raises TypeError for an unknown option, InvalidRequest naming the argument for a wrong value,
    ImportError without Ray.
    """
    checked = _checked(
        {
            "model": model,
            "replicas": (replicas, replicas) if isinstance(replicas, int | float) else replicas,
            "cpus": cpus,
            "gpus": gpus,
            "waiting": waiting,
            "kv": kv,
            "autoscaling": {} if autoscaling is None else autoscaling,
            "surge": surge,
            "prefill": prefill,
        },
        _Arguments,
    )
    least, most = checked.replicas
    if least > most:
        raise InvalidRequest(f"replicas: from {least} to {most}")
    if gpus > 1 and gpus % 1:
        raise InvalidRequest(f"gpus: a part of one, or whole ones, not {gpus}")
    if twice := sorted(_OURS & checked.autoscaling.keys()):
        raise InvalidRequest(f"autoscaling: {twice[0]} follows from `replicas`, `waiting` and `kv`")
    if least == most and checked.autoscaling:
        raise InvalidRequest(f"autoscaling: replicas is {most}, not from so many to so many")
    if refused := sorted(_NOT_HERE.keys() & options.keys()):
        raise InvalidRequest(f"{refused[0]}: not on a Ray cluster: {_NOT_HERE[refused[0]]}")
    options = {"device": "cuda" if gpus else "cpu", "threads": max(int(cpus), 1), **options}
    options.setdefault("http_port", 0)
    options.setdefault("disaggregate_by", "tcp")
    address = options.pop("program_address", "tcp://NODE:30001")
    try:
        stated = runtime_config(model, address, options)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
    config = _checked(stated, RuntimeConfig)

    from rootlace.runtime.replicas.handover import apart_of, transfer_of

    apart = apart_of(config.gateway, 2 * prefill)
    way = msgspec.json.encode(apart and transfer_of(apart, shared=False))

    from pydantic import ValidationError
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    from rootlace.deploy.deployments import EngineReplica, Front

    scaled: dict[str, Any] = {"num_replicas": least}
    if least < most:
        policy = AutoscalingPolicy(
            policy_function="rootlace.deploy:ByQueueAndKV",
            policy_kwargs={"waiting": waiting, "kv": kv},
        )
        if unknown := sorted(checked.autoscaling.keys() - AutoscalingConfig.model_fields.keys()):
            raise InvalidRequest(f"autoscaling: Serve's AutoscalingConfig has no {unknown[0]}")
        further = {"min_replicas": least, "max_replicas": most, **checked.autoscaling}
        try:
            scaled = {"autoscaling_config": AutoscalingConfig(policy=policy, **further)}
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()
            )
            raise InvalidRequest(f"autoscaling: {faults}") from None
    seconds = config.gateway.drain_seconds
    engine = msgspec.json.encode(config.engine)
    key = secrets.token_hex(16)
    version = hashlib.sha256(engine + key.encode()).hexdigest()
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": seconds + MORE_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_surge_percent": surge,
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
    }
    engines = serve.deployment(EngineReplica, name="engines", **common, **scaled)
    described = (engine, version, key, seconds, way)
    bound = [engines.bind(*described)]
    if prefill:
        apart_too = serve.deployment(EngineReplica, name="prefill", num_replicas=prefill, **common)
        bound.append(apart_too.bind(*described, True))
    front = serve.deployment(
        Front,
        name="gateway",
        num_replicas=1,
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=seconds + MORE_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    # During an update, ending and beginning replicas exist side by side.
    places = 2 * (most + prefill)
    return front.bind(msgspec.json.encode(config), version, key, places, 2 * prefill, *bound)


def build(args: Mapping[str, Any]) -> Application:
    """Call `app` with the `args` of a configuration file, or of `serve run`, whose values are
    texts. `replicas` may be a range, such as 1-4."""
    texts = {"model": str, **{n: one.type for one in settings(RuntimeConfig) for n in one.names}}
    options: dict[str, Any] = {}
    for name, value in args.items():
        name = name.replace("-", "_")
        options[name] = _read(value, texts.get(name, float))
    if "model" not in options:
        raise InvalidRequest("model: which one is to be served, a folder or a name?")
    replicas = options.pop("replicas", 1)
    if isinstance(replicas, str):
        least, _, most = replicas.partition("-")
        try:
            replicas = int(least), int(most)
        except ValueError:
            raise InvalidRequest(f"replicas: a number, or 1-4, not {replicas!r}") from None
    return app(replicas=replicas, **options)


def _read(value: Any, kind: Any) -> Any:
    """Convert a text to `kind`, or else to a number or truth value; return others unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        pass
    try:
        read = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value
    return read if isinstance(read, int | float) else value


def _checked(values: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None
