"""Files of a model that concern text: tokenizer, chat template, and default sampling."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from rootlace.runtime.config import OWN_CONFIGS, GatewayConfig
from rootlace.runtime.model.checkpoint.source import (
    GENERATION_CONFIG,
    FolderSource,
    ModelSource,
    model_source,
)
from rootlace.runtime.model.hub.local import recommended_sampling
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sampling import PARAMETERS, TUNED

# Texts --------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

OPTION = "--default-sampling"
_NAMES = {
    alias: name for name in (*TUNED, "max_tokens") for alias in (name, *PARAMETERS[name].aliases)
}

# Keys of generation_config.json without effect here. They concern a text's begin and end, how
# transformers computes and returns it, and its default of `do_sample`. Other servers ignore
# `do_sample` as well: temperature 0 is greedy.
_ELSEWHERE = frozenset(
    {
        *("transformers_version", "_from_model_config", "_name_or_path", "trust_remote_code"),
        *("do_sample", "max_length", "min_length", "use_cache", "cache_implementation"),
        *("cache_config", "return_dict_in_generate", "return_legacy_cache", "disable_compile"),
        *("compile_config", "low_memory", "is_assistant", "prompt_lookup_num_tokens"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "early_stopping"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("max_matching_ngram_size", "remove_invalid_values", "renormalize_logits"),
    }
)
_ELSEWHERE_BEGIN, _ELSEWHERE_END = ("output_",), ("_token_id",)


class ModelTexts(msgspec.Struct, frozen=True):
    """Parsed files of a model on texts and tokens. `sampling`: the defaults of sampling parameters,
    and where each comes from."""

    source: ModelSource
    tokenizer: Tokenizer
    chat: ChatTemplate
    eos_ids: frozenset[int]
    sampling: tuple[dict[str, float], dict[str, str]]

    @classmethod
    def read(cls, config: GatewayConfig) -> ModelTexts:
        source = model_source(config.model)
        tokenizer = Tokenizer.read(source)
        chat = load_chat(source, tokenizer)
        return cls(
            source, tokenizer, chat, load_eos_ids(source, tokenizer), load_sampling(source, config)
        )

    def log_sampling(self, name: str) -> None:
        """Log the default sampling of requests for the model `name`."""
        values, origins = self.sampling
        if values:
            shown = (f"{key} {value:g} ({origins[key]})" for key, value in values.items())
            log.info("default sampling of %s: %s", name, ", ".join(shown))
        if not values.keys() & {*TUNED}:  # a bound on length is no recommendation of sampling
            log.warning(
                "%s recommends no sampling: requests without a temperature are sampled at the "
                "default of their interface, which is 1 with nothing cut (Ollama's: 0.8); "
                "%s temperature=0.7 changes that",
                name,
                OPTION,
            )


def load_chat(source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate:
    """Read the model's chat template with the tokenizer's special tokens."""
    special = [token.content for token in tokenizer.added.values() if token.special]
    bos = "".join(tokenizer.content(id_) or "" for id_ in tokenizer.bos_ids)
    return ChatTemplate.read(source, special, bos)


def load_eos_ids(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a text: those of the model's files, and the tokenizer's own."""
    token_ids = source.eos_token_id()
    ids = {token_ids} if isinstance(token_ids, int) else set(token_ids or ())
    token = tokenizer.config.get("eos_token")
    content = token["content"] if isinstance(token, dict) else token
    own = tokenizer.id_of(content) if content else None
    return frozenset(ids if own is None else ids | {own})


def load_sampling(
    source: ModelSource, config: GatewayConfig
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the defaults of sampling parameters, and where each comes from. Options come first,
    then the model's files or the file named by an option. A file's value that cannot be applied is
    logged; an option's raises InvalidRequest."""
    origin, own = "", dict[str, Any]()
    if config.generation_config != "none":
        if config.generation_config != "auto":
            source = FolderSource(_folder_of(config.generation_config))
        origin, own = source.generation_config()
        if config.generation_config == "auto" and not own:
            origin, own = "packaged.toml", recommended_sampling(source.path)
    recommended = dict(_recommended(origin, own))
    options = dict(_chosen(config.default_sampling))
    origins = dict.fromkeys(recommended, origin) | dict.fromkeys(options, OPTION)
    return recommended | options, origins


def check_sampling(config: GatewayConfig) -> None:
    """Raise InvalidRequest for options that name no defaults."""
    dict(_chosen(config.default_sampling))
    if config.generation_config not in OWN_CONFIGS:
        _folder_of(config.generation_config)


def _folder_of(value: str) -> Path:
    path = Path(value).expanduser()
    folder = path.parent if path.name == GENERATION_CONFIG else path
    if not (folder / GENERATION_CONFIG).is_file():
        raise InvalidRequest(
            f"--generation-config: {value} is neither auto nor none, nor a {GENERATION_CONFIG}, nor"
            " a folder with one"
        )
    return folder


def _recommended(origin: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Give a file's recommendations by our names; log the keys without effect."""
    for key, value in values.items():
        name = _NAMES.get(key)
        if name is None:
            elsewhere = key in _ELSEWHERE or key.startswith(_ELSEWHERE_BEGIN)
            # Neither a number nor a list of them asks for anything here.
            usual = (
                value is None or value is False or (type(value) in (int, float) and value in (0, 1))
            )
            if not (elsewhere or usual or key.endswith(_ELSEWHERE_END) or value in ("", [], {})):
                log.warning("%s: %s %r has no effect", origin, key, value)
        elif value is not None:
            try:
                yield name, PARAMETERS[name].read(value)
            except ValueError as error:
                log.warning("%s: %s is not applied: %s", origin, key, error)


def _chosen(options: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Give the defaults that the option names. Raises InvalidRequest for an unknown one."""
    for item in ",".join(options).split(","):
        if not item.strip():
            continue
        key, equals, value = (part.strip() for part in item.partition("="))
        name = _NAMES.get(key)
        if not equals or name is None:
            close = get_close_matches(key, _NAMES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_NAMES)}"
            wrong = (
                f"no parameter {key!r}; {hint}" if equals else f"{item.strip()!r} is not KEY=VALUE"
            )
            raise InvalidRequest(f"{OPTION}: {wrong}")
        try:
            yield name, PARAMETERS[name].read(value, strict=False)
        except ValueError as error:
            raise InvalidRequest(f"{OPTION}: {error}") from None
