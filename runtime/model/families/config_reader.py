"""Read the keys of a `config.json`: each key is read, known to change nothing, or refused.

An unknown key is refused even if transformers ignores the key: its author meant something. A
refused model is better than a model computed otherwise than meant. `IGNORED` lists keys that change
nothing; a user can name further ones (`--ignore-config-keys`).

Importing this module imports no torch: an unsupported model is refused at once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rootlace.wire.errors import UnsupportedModel
from rootlace.wire.sampling import TUNED


def read_json(file: Path, missing: Any = None) -> Any:
    """Return the object in a JSON file, or the list if `missing` is a list. `missing`, if given, is
    returned if the file does not exist. Raises `UnsupportedModel`."""
    kind = dict if missing is None else type(missing)
    try:
        if missing is not None and not file.is_file():
            return missing
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    except RecursionError as error:
        raise UnsupportedModel(f"{file}: it is nested too deeply") from error
    if not isinstance(found, kind):
        raise UnsupportedModel(f"{file}: not a JSON {'object' if kind is dict else 'list'}")
    return found


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED = names(
    # Read earlier, by `checkpoint.config`.
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
    # The tokenizer, and its longest text.
    "tokenizer_class prefix unk_token_id sep_token_id cls_token_id model_max_length "
    "max_sequence_length tokenizer_model_max_length "
    # Origin of a folder, and remarks of tools.
    "_name_or_path name_or_path _commit_hash transformers_version auto_map "
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version _unsloth_version "
    "base_model base_model_name_or_path created_by framework language library_name license "
    "model_name model_version pipeline_tag tags trust_remote_code version "
    "bos_token eos_token pad_token sep_token unk_token max_seq_len max_seq_length seq_length "
    "use_fast_tokenizer use_flash_attn use_flash_attention "
    # Sampling settings in old checkpoints, with `TUNED` below.
    "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight "
    "assistant_lookbehind bad_words_ids begin_suppress_tokens cache_config cache_implementation "
    "compile_config constraints continuous_batching_config decoder_start_token_id disable_compile "
    "diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant "
    "length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens "
    "max_time min_length min_new_tokens no_repeat_ngram_size num_assistant_tokens "
    "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits "
    "output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens "
    "remove_invalid_values renormalize_logits return_dict_in_generate "
    "sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind "
    "token_healing top_h typical_p use_mtp watermarking_config _from_model_config"
).union(TUNED)
"""Keys that say nothing about a decoder's computation."""

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
"""Keys of which one value is supported, unless a family reads the key."""


class Kind(msgspec.Struct, frozen=True):
    """Kind of values that a key may have, and its name in messages."""

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """Return a kind of the same values or null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.fits(value))


_LARGE = 1 << 48
"""Bound on a model's sizes and numbers; products of smaller numbers do not overflow."""
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
NOT_ASKED: Collection[str] = frozenset({""})
"""User's keys for a file in which --ignore-config-keys has no effect."""


def _cut(text: str, limit: int = 100) -> str:
    """Cut a long text for a message."""
    return text if len(text) <= limit else text[:limit] + "..."


class ConfigReader:
    """Reader of the keys of a `config.json`, or of an object `inside` one. Remembers the read keys;
    names the file in errors."""

    def __init__(self, file: Path, values: Mapping[str, Any], inside: str = "") -> None:
        self._file = file
        self._values = values
        self._inside = inside
        self._read: set[str] = set()
        self._names: Mapping[str, str] = {}

    def renamed(self, names: Mapping[str, str], **defaults: Any) -> ConfigReader:
        """Return a reader of the same keys under other names: asked for -> the file's key.
        `defaults` replace keys missing in the file."""
        view = copy.copy(self)
        view._names = names
        view._values = defaults | dict(self._values)
        return view

    def name(self, key: str) -> str:
        """Return the file's name for a key."""
        return self._names.get(key, key)

    def get(self, key: str, kind: Kind, default: Any = REQUIRED) -> Any:
        """Return a key's value. Refuses another kind, and a missing key without `default`."""
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
        """Mark keys as read that change nothing, whatever their values."""
        self._read.update(map(self.name, keys))

    def table(self, key: str) -> ConfigReader:
        """Return a reader of the object at a key."""
        return ConfigReader(self._file, self.get(key, TABLE), f"{self._inside}{key}.")

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """Return a positive integer."""
        found: int = self.get(key, SIZE, default)
        return found

    def layers(self) -> int:
        """Return `num_hidden_layers`, with a bound: tuples of this length are made."""
        found = self.size("num_hidden_layers")
        if found > 1 << 16:
            self.refuse("num_hidden_layers", "these are too many")
        return found

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """Return a finite number."""
        return float(self.get(key, NUMBER, default))

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """Return true or false."""
        found: bool = self.get(key, FLAG, default)
        return found

    def only(self, key: str, value: object) -> None:
        """Refuse any other value of the key."""
        key = self.name(key)
        self._read.add(key)
        if self._values.get(key, value) not in (value, None):
            self.refuse(key, f"only {value!r} is supported")

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise `UnsupportedModel`, naming the key and its value."""
        key = self.name(key)
        value = _cut(repr(self._values.get(key)))
        raise UnsupportedModel(f"{self._file}: {self._inside}{_cut(key)} {value}: {why}")

    def finish(
        self, harmless: Set[str] = IGNORED, by_user: Collection[str] | None = NOT_ASKED
    ) -> None:
        """Refuse keys that were not read, unless they are `harmless` or null. The user may accept
        further keys (`by_user`; None: all), unless `NOT_ASKED`."""
        why = "this key is not known"
        if by_user is not NOT_ASKED:
            why += "; if it changes nothing: --ignore-config-keys NAME"
        for key in sorted(self._values.keys() - self._read - harmless):
            if key in ONLY:  # also where the user names it
                self.only(key, ONLY[key])
            elif self._values[key] is not None and by_user is not None and key not in by_user:
                self.refuse(key, why)
