"""How a `config.json` says that positions rotate queries and keys, and how many there are.

Old checkpoints say `rope_theta` and `rope_scaling`, new ones have all of it in `rope_parameters`;
what is said twice counts as in transformers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rootlace.runtime.model.families.spec import Rope
from rootlace.wire.errors import UnsupportedModel

# Given --------------------------------------------------------------------------------------------
#
# The keys of a `config.json`: each is read, known to change nothing, or refused by name.
#
# What nobody reads is refused also where transformers would not look at it: whoever wrote it meant
# something, and a model that is silently computed otherwise than it was meant is worse than one
# that is refused. Whoever knows better removes the key. Keys known to be harmless are listed here.
#
# Nothing here imports torch: a model that is refused is refused at once.


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED = names(
    # Read before: `checkpoint.config`.
    "architectures model_type dtype torch_dtype bos_token_id eos_token_id quantization_config "
    # Training, and how transformers runs a model.
    "initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout "
    "residual_dropout embedding_dropout classifier_dropout "
    "activation_dropout dropout layerdrop init_std "
    "attention_probs_dropout_prob hidden_dropout_prob "
    "output_router_logits router_aux_loss_coef router_jitter_noise "
    "neftune_noise_alpha gradient_checkpointing use_reentrant_checkpointing use_cache "
    "pretraining_tp pad_token_id "
    "chunk_size_feed_forward output_attentions output_hidden_states return_dict torchscript "
    "use_bfloat16 tf_legacy_loss attn_implementation _attn_implementation "
    "_attn_implementation_autoset _flash_attn_2_enabled output_past custom_pipelines "
    # Other tasks than continuing a text.
    "id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params "
    # The tokenizer, and how long a text it was used for.
    "tokenizer_class prefix unk_token_id sep_token_id cls_token_id model_max_length "
    "max_sequence_length tokenizer_model_max_length "
    # Where a folder comes from, and remarks of tools.
    "_name_or_path name_or_path _commit_hash transformers_version auto_map "
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version "
    # How to sample: old checkpoints say it here.
    "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight "
    "assistant_lookbehind bad_words_ids begin_suppress_tokens cache_config cache_implementation "
    "compile_config constraints continuous_batching_config decoder_start_token_id disable_compile "
    "diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant "
    "length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens "
    "max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits "
    "output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens "
    "remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate "
    "sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature "
    "token_healing top_h top_k top_p typical_p use_mtp watermarking_config _from_model_config"
)
"""Keys that say nothing about what a decoder computes."""

ONLY: dict[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "qk_layer_norms": False,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
    "use_resampler": False,
    "use_sliding_window": False,
}
"""Keys of which one value is supported, where a family does not read them."""


@dataclass(frozen=True)
class Kind:
    """What values a key may have."""

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """These values, or null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.fits(value))


_LARGE = 1 << 48
"""No size or number of a model is as large; products of smaller ones do not overflow."""
SIZE = Kind("a positive integer", lambda value: type(value) is int and 0 < value < _LARGE)
COUNT = Kind("an integer of at least 0", lambda value: type(value) is int and 0 <= value < _LARGE)
NUMBER = Kind("a number", lambda v: type(v) in (int, float) and abs(v) < _LARGE)
POSITIVE = Kind("a positive number", lambda value: NUMBER.fits(value) and value > 0)
NOT_NEGATIVE = Kind("a number of at least 0", lambda value: NUMBER.fits(value) and value >= 0)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a text", lambda value: type(value) is str)
TEXTS = Kind("a list of texts", lambda v: type(v) is list and all(type(one) is str for one in v))
COUNTS = Kind(
    "a list of integers of at least 0", lambda v: type(v) is list and all(map(COUNT.fits, v))
)
TOKEN = Kind("a token id", COUNT.fits)
TOKENS = Kind(
    "a token id or a list of them",
    lambda ids: COUNT.fits(ids) or (type(ids) is list and all(map(COUNT.fits, ids))),
)
TABLE = Kind("an object", lambda value: type(value) is dict)

REQUIRED: Any = object()


def _cut(text: str, most: int = 100) -> str:
    """What a message has of a text that may be long."""
    return text if len(text) <= most else text[:most] + "..."


class ConfigReader:
    """The keys of a `config.json`, or of an object `inside` it; remembers which were read. What is
    refused names the file."""

    def __init__(self, file: Path, values: Mapping[str, Any], inside: str = "") -> None:
        self._file = file
        self._values = values
        self._inside = inside
        self._read: set[str] = set()
        self._names: Mapping[str, str] = {}

    def renamed(self, names: Mapping[str, str], **defaults: Any) -> ConfigReader:
        """The same keys, of which some are asked for by other names (here: what is asked for -> the
        file's key), and `defaults` for what the file does not have."""
        view = copy.copy(self)
        view._names = names
        view._values = defaults | dict(self._values)
        return view

    def name(self, key: str) -> str:
        """What the file calls a key."""
        return self._names.get(key, key)

    def __call__(self, key: str, kind: Kind, default: Any = REQUIRED) -> Any:
        """The value of a key. Refuses one of another kind, and a missing one without `default`."""
        key = self.name(key)
        self._read.add(key)
        if key in self._values:
            value = self._values[key]
            if not kind.fits(value):
                self.refuse(key, f"it is not {kind.words}")
            return value
        if default is REQUIRED:
            raise UnsupportedModel(f"{self._file}: {self._inside}{key} is missing")
        return default

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def pass_over(self, *keys: str) -> None:
        """These keys change nothing, whatever they say."""
        self._read.update(map(self.name, keys))

    def table(self, key: str) -> ConfigReader:
        """The keys of an object."""
        return ConfigReader(self._file, self(key, TABLE), f"{self._inside}{key}.")

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """A positive integer."""
        found: int = self(key, SIZE, default)
        return found

    def layers(self) -> int:
        """`num_hidden_layers`, of which a list is made."""
        found = self.size("num_hidden_layers")
        if found > 1 << 16:
            self.refuse("num_hidden_layers", "these are too many")
        return found

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A finite number."""
        return float(self(key, NUMBER, default))

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """true or false."""
        found: bool = self(key, FLAG, default)
        return found

    def only(self, key: str, value: object) -> None:
        """Refuse any other value of the key."""
        key = self.name(key)
        self._read.add(key)
        if self._values.get(key, value) not in (value, None):
            self.refuse(key, f"only {value!r} is supported")

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises `UnsupportedModel`, naming the key and its value."""
        key = self.name(key)
        value = _cut(repr(self._values.get(key)))
        raise UnsupportedModel(f"{self._file}: {self._inside}{_cut(key)} {value}: {why}")

    def finish(self, ignored: Set[str] = IGNORED) -> None:
        """Refuse the keys that nobody has read, unless they change nothing (those that are
        `ignored`) or have no value."""
        for key in sorted(self._values.keys() - self._read - ignored):
            if key in ONLY:
                self.only(key, ONLY[key])
            elif self._values[key] is not None:
                self.refuse(key, "this key is not known; remove it if it changes nothing")


# Positions ----------------------------------------------------------------------------------------


_FACTORS = Kind(
    "a list of positive numbers", lambda v: type(v) is list and all(map(POSITIVE.fits, v))
)
_TRUE_OR_FALSE = FLAG.or_none()
ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"

COMMON: dict[str, Kind] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    PARTIAL: NUMBER.or_none(),
}
"""The keys of `rope_parameters` of every rope type."""

OF_KIND: dict[str, dict[str, Kind]] = {
    "default": {},
    "linear": {"factor": POSITIVE},
    "dynamic": {"factor": POSITIVE},
    "yarn": {
        "factor": POSITIVE,
        ORIGINAL: SIZE.or_none(),
        "attention_factor": NUMBER.or_none(),
        "beta_fast": NOT_NEGATIVE.or_none(),
        "beta_slow": NOT_NEGATIVE.or_none(),
        "mscale": NOT_NEGATIVE.or_none(),
        "mscale_all_dim": NOT_NEGATIVE.or_none(),
        "truncate": _TRUE_OR_FALSE,
        "finetuned": _TRUE_OR_FALSE,  # a remark: how the checkpoint was made
    },
    "longrope": {
        "short_factor": _FACTORS,
        "long_factor": _FACTORS,
        ORIGINAL: SIZE.or_none(),
        "factor": POSITIVE.or_none(),
        "attention_factor": NUMBER.or_none(),
    },
    "llama3": {
        "factor": POSITIVE,
        "low_freq_factor": POSITIVE,
        "high_freq_factor": POSITIVE,
        ORIGINAL: SIZE.or_none(),
    },
}
"""The supported rope types, each with the keys that it has beside those."""

NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""The parameters that each of them cannot do without."""
KINDS = {kind: kind for kind in NEEDED}
NONE: Mapping[str, Kind] = {}


def read_rope(
    given: ConfigReader,
    theta: float = 10000.0,
    *,
    original: int | None = None,
    head_dim: int | None = None,
    partial: float | None = None,
    kinds: Mapping[str, str] = KINDS,
    theta_key: str = "rope_theta",
    partial_key: str = PARTIAL,
    own: Mapping[str, Kind] = NONE,
) -> Rope:
    """How a family rotates.

    `theta`, `original` (the context before it was extended) and `partial` (the share of a head that
    is rotated) are those of a file that has none. `head_dim` is given where the family can rotate a
    part of a head. `kinds` are the rope types that it has, by what it calls them. Outside of
    `rope_parameters`, theta and share are called `theta_key` and `partial_key`; inside, there may
    be keys of its `own`.
    """
    where = "rope_scaling" if given("rope_scaling", TABLE.or_none(), None) else "rope_parameters"
    parameters: dict[str, Any] = dict(given("rope_parameters", TABLE.or_none(), None) or {})
    if where == "rope_scaling":
        parameters = dict(given("rope_scaling", TABLE))
    _set_theta(given, theta_key, parameters, theta)
    partial = given(partial_key, NUMBER.or_none(), partial)
    key = where if PARTIAL in parameters else partial_key
    if partial is not None:
        parameters.setdefault(PARTIAL, partial)
    original = given(ORIGINAL, SIZE.or_none(), original)
    kind = _kind(given, where, parameters, kinds, original, own)
    if ORIGINAL in OF_KIND[kind] and original is None and ORIGINAL in given:
        given.refuse(ORIGINAL, f"rope_type {kind!r} needs it")
    return Rope(kind, parameters, _rotated(given, key, parameters, head_dim))


def read_two_ropes(
    given: ConfigReader, theta: float, local_theta: float, local_key: str = "rope_theta"
) -> Rope:
    """How a family rotates whose layers with windows never were extended to longer contexts:
    `rope_parameters` has an object for each type of layer, an older `rope_scaling` is that of the
    layers without windows. `theta` and `local_theta` are those of a file without `rope_theta` and
    `local_key`."""
    nested = given("rope_parameters", TABLE.or_none(), None) or {}
    if not nested.keys() <= {"full_attention", "sliding_attention"}:
        given.refuse("rope_parameters", "only full_attention and sliding_attention are known")
    for name, part in nested.items():
        if not TABLE.or_none().fits(part):
            given.refuse("rope_parameters", f"{name} is not {TABLE.words}")
    scaling = given("rope_scaling", TABLE.or_none(), None) or {}
    if "type" in scaling and "rope_type" not in scaling:
        given.refuse(
            "rope_scaling",
            "transformers ignores a `type` here; write `rope_type` for what is meant, or remove "
            "rope_scaling for transformers' numbers",
        )
    full = dict(nested.get("full_attention") or {}) | scaling
    local = dict(nested.get("sliding_attention") or {})
    _set_theta(given, "rope_theta", full, theta)
    _set_theta(given, local_key, local, local_theta)
    kind = _kind(given, "rope_scaling" if scaling else "rope_parameters", full, KINDS, None)
    if _kind(given, "rope_parameters", local, KINDS, None) != "default":
        given.refuse("rope_parameters", "only the default rope_type is supported with windows")
    for part in (full, local):
        if part.get(PARTIAL) not in (1.0, None) or not part.get("truncate", True):
            given.refuse("rope_parameters", "partial_rotary_factor and truncate are not supported")
    return Rope(kind, full, local_theta=local["rope_theta"])


def check_factors(given: ConfigReader, rope: Rope, head_dim: int) -> None:
    """Refuse `longrope` whose factors are not one for each pair of a head."""
    pairs = (rope.rotated or head_dim) // 2
    for key in ("short_factor", "long_factor") if rope.kind == "longrope" else ():
        if len(rope.parameters[key]) != pairs:
            old = given("rope_scaling", TABLE.or_none(), None)
            given.refuse(
                "rope_scaling" if old else "rope_parameters",
                f"{key} has {len(rope.parameters[key])} numbers, and {pairs} pairs of a head are "
                f"rotated (head_dim or hidden_size, {PARTIAL})",
            )


def read_context(given: ConfigReader, rope: Rope) -> int:
    """How many positions the model was made for.

    `max_position_embeddings` of a checkpoint that is to be extended by interpolation is mostly the
    length before that: those who add YaRN to a `config.json` (as model cards of Qwen tell them to)
    add `rope_scaling` alone, and of `linear` transformers' documentation says not to change it. So
    the length that scaling gives counts, unless the file names a longer one. With `llama3` and
    `longrope` it is the length that was reached, and `dynamic` leaves it as it is: its angles
    depend on the length of the text beyond it, which cached keys cannot follow.
    """
    stated = given.size("max_position_embeddings")
    if rope.kind == "linear":
        return max(stated, int(rope.parameters["factor"] * stated))
    if rope.kind == "yarn":
        original = rope.parameters["original_max_position_embeddings"]
        return max(stated, int(rope.parameters["factor"] * original))
    return stated


def _kind(
    given: ConfigReader,
    where: str,
    parameters: dict[str, Any],
    kinds: Mapping[str, str],
    original: int | None,
    own: Mapping[str, Kind] = NONE,
) -> str:
    """The rope type, of one of `kinds`, after a check that its parameters are known and complete;
    those that follow from others are added. `original`: what the file says outside of them; `own`:
    keys of the family's own."""
    name, kind = _named_kind(given, where, parameters, kinds)
    for needed in NEEDED[kind]:
        if parameters.get(needed) is None:
            given.refuse(where, f"rope_type {name!r} needs {needed}")
    _check(given, where, parameters, name, COMMON | OF_KIND[kind] | dict(own))
    context = given.size("max_position_embeddings")
    if ORIGINAL in OF_KIND[kind]:
        # Outside of `rope_parameters` it counts for more.
        parameters[ORIGINAL] = original or parameters.get(ORIGINAL) or context
    if kind == "longrope":
        if parameters[ORIGINAL] == 1:
            given.refuse(where, f"{ORIGINAL} is 1")
        if parameters.get("factor") is None:
            parameters["factor"] = context / parameters[ORIGINAL]
    if kind == "yarn" and parameters["rope_theta"] == 1:
        given.refuse(where, f"rope_type {name!r} cannot have a rope_theta of 1")
    return kind


def _named_kind(
    given: ConfigReader, where: str, parameters: dict[str, Any], kinds: Mapping[str, str]
) -> tuple[str, str]:
    """What the file calls the rope type, and which it is. `type` is the older key."""
    names = [parameters[key] for key in ("rope_type", "type") if key in parameters] or ["default"]
    for name in names:
        if not TEXT.fits(name):
            given.refuse(where, f"rope_type is not {TEXT.words}")
        if name not in kinds:
            given.refuse(where, f"rope_type {name!r} is not supported ({', '.join(kinds)})")
    if len({kinds[name] for name in names}) > 1:
        given.refuse(where, "rope_type and type contradict each other")
    return names[0], kinds[names[0]]


def _set_theta(given: ConfigReader, key: str, parameters: dict[str, Any], default: float) -> None:
    """Add `rope_theta`, unless it is there: then `key` of the file does not count, nor its null."""
    theta = given(key, POSITIVE.or_none() if "rope_theta" in parameters else POSITIVE, default)
    parameters.setdefault("rope_theta", theta)


def _rotated(
    given: ConfigReader, key: str, parameters: dict[str, Any], head_dim: int | None
) -> int | None:
    """How many numbers of a head are rotated; None: all."""
    share = parameters.get(PARTIAL)
    if share in (1.0, None):
        return None
    rotated = int((head_dim or 0) * share)
    if not rotated > 0 or rotated % 2 or rotated > (head_dim or 0):
        given.refuse(key, f"a partial_rotary_factor of {share} is not supported")
    return None if rotated == head_dim else rotated


def _check(
    given: ConfigReader,
    where: str,
    parameters: dict[str, Any],
    name: str,
    known: Mapping[str, Kind],
) -> None:
    """Refuse what a rotation of this name, whose `known` keys these are, does not use, unless it
    has no value."""
    if "beta_fast" in known and parameters.get("attn_factor") is not None:
        given.refuse(where, _of_attn_factor(parameters))
    for key, value in sorted(parameters.items()):
        if key in known and not known[key].fits(value):
            given.refuse(where, f"{key} is not {known[key].words}")
        if key not in known and value is not None:
            given.refuse(where, f"{key} is not known with rope_type {name!r}")


def _of_attn_factor(parameters: dict[str, Any]) -> str:
    """What to write for a key that other programs multiply YaRN's own factor by."""
    share: Any = parameters["attn_factor"]
    factor: Any = parameters.get("factor")
    meant = ""
    if POSITIVE.fits(share) and POSITIVE.fits(factor):
        meant = f" ({share * (0.1 * math.log(max(factor, 1.0)) + 1.0):.4g})"
    return (
        "transformers ignores attn_factor; write attention_factor, which is attn_factor times "
        f"0.1 ln(factor) + 1{meant}, for what is meant, or remove it for transformers' numbers"
    )
