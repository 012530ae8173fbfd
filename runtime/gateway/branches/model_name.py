"""What clients may call a model."""

from __future__ import annotations

from rootlace.runtime.config import GatewayConfig
from rootlace.wire.errors import ModelNotFound
from rootlace.wire.protocol import ModelInfo


def name_of(config: GatewayConfig) -> str:
    """That which was chosen, or that of the model's folder."""
    path = config.model
    return config.served_name or path.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or path


def model_names(info: ModelInfo) -> list[str]:
    """The model, and the model with each of its adapters behind it (`MODEL:ADAPTER`)."""
    return [info.name, *(f"{info.name}:{adapter}" for adapter in info.adapters)]


def check_name(info: ModelInfo, asked: str | None) -> str:
    """The one of `model_names` that is asked for. Raises ModelNotFound for another model."""
    if not asked or asked in (info.name, info.path, "default"):
        return info.name
    for adapter in info.adapters:
        if asked in (f"{info.name}:{adapter}", f"{info.path}:{adapter}", f"default:{adapter}"):
            return f"{info.name}:{adapter}"
    raise not_found(asked, model_names(info))


def not_found(asked: str, names: list[str]) -> ModelNotFound:
    return ModelNotFound(
        f"the model {asked!r} does not exist; this server has {', '.join(map(repr, names))}"
    )
