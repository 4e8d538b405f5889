"""Strict reading of `config.json`: every key is consumed, known to be irrelevant, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, cast

from coli_server.errors import ModelError
from coli_server.experts.safetensors_header import load_json

MAX_BYTES = 16 << 20  # of a configuration file

T = TypeVar("T")
_MISSING = object()

# Keys that every family's configuration may have and that say nothing about its logits: how the model was
# trained or saved, what the saving library was asked to return, and defaults for drawing tokens.
_IRRELEVANT_WORDS = """
    architectures auto_map model_type dtype torch_dtype transformers_version initializer_range
    _name_or_path _attn_implementation_autoset
    bos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class
    attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef
    return_dict use_return_dict use_cache is_decoder is_encoder_decoder chunk_size_feed_forward
    id2label label2id problem_type
    max_length max_new_tokens min_length do_sample temperature top_k top_p typical_p
    repetition_penalty num_beams num_beam_groups diversity_penalty length_penalty early_stopping
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences output_scores
    return_dict_in_generate remove_invalid_values torchscript use_bfloat16 tf_legacy_loss pruned_heads
    tie_encoder_decoder add_cross_attention gradient_checkpointing unsloth_version unsloth_fixed
"""
IRRELEVANT = frozenset(_IRRELEVANT_WORDS.split())


class ConfigError(ModelError):
    """A `config.json` that is broken or asks for something that is not understood."""


class Config:
    """A view of a JSON object that remembers which of its keys were read.

    Values are checked as they are read; `finish()` refuses keys that nobody read, so that an option
    that is not understood can never be ignored.
    """

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read the file `path`. Raises ModelError unless it is one JSON object without double keys."""
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes")
            raw = path.read_bytes()
        except FileNotFoundError:
            what = f"has no {path.name}" if path.parent.exists() else "does not exist"
            raise ConfigError(
                f"{path.parent} {what}: a model is a Hugging Face folder with config.json and safetensors"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        values = load_json(raw, path)
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
        return cls(values, str(path))

    def error(self, key: str, accepted: str) -> ConfigError:
        """A ConfigError that names `key`, its value and what would have been accepted."""
        value = json.dumps(self._values.get(key))[:200]
        return ConfigError(f"{self._where}: {key}={value} is not supported; accepted: {accepted}")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._values.get(key) is not None

    def raw(self, key: str, default: object = None) -> object:
        """The value as it is in the file, marked as read."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: object = _MISSING, *, low: int = 1, high: int = 1 << 24) -> int:
        """An integer in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer in [{low}, {high}]")
        return value

    def number(
        self, key: str, default: object = _MISSING, *, low: float = -1e30, high: float = 1e30
    ) -> float:
        """A finite number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "a finite number")
        if not low <= value <= high:
            raise self.error(key, f"a number in [{low:g}, {high:g}]")
        return float(value)

    def positive(self, key: str, default: object = _MISSING) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, "a number above 0")
        return value

    def flag(self, key: str, default: object = _MISSING) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, accepted: tuple[T, ...], default: object = _MISSING) -> T:
        """One of `accepted`, compared by type and value."""
        value = self._get(key, default)
        for candidate in accepted:
            if type(candidate) is type(value) and candidate == value:
                return candidate
        raise self.error(key, " or ".join(json.dumps(candidate) for candidate in accepted))

    def optional_integer(self, key: str, *, low: int = 1, high: int = 1 << 24) -> int | None:
        """An integer in [low, high], or None where the key is absent or null."""
        self._read.add(key)
        return self.integer(key, low=low, high=high) if self.has(key) else None

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of non-negative integers; empty when absent."""
        value = self.raw(key, [])
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            raise self.error(key, "a list of non-negative integers")
        return tuple(value)

    def words(self, key: str, count: int, accepted: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of `count` words, each one of `accepted`; None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or any(item not in accepted for item in value):
            raise self.error(key, f"a list of {count} words out of {', '.join(accepted)}")
        return tuple(cast("list[str]", value))

    def section(self, key: str) -> Config | None:
        """A nested object as a Config of its own; None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Config(value, f"{self._where}: {key}")

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """A token id or a list of them, each below `vocab`; empty when absent."""
        value = self.raw(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(item) is not int or not 0 <= item < vocab for item in ids):
            raise self.error(key, f"token ids from 0 to {vocab - 1}")
        return tuple(cast("list[int]", ids))

    @property
    def consumed(self) -> frozenset[str]:
        """The keys that were read so far, whether they are in the file or not."""
        return frozenset(self._read)

    def finish(self, irrelevant: frozenset[str] = IRRELEVANT) -> None:
        """Refuse the first key that was neither read nor is in `irrelevant`; a null says nothing."""
        for key, value in self._values.items():
            if key not in self._read and key not in irrelevant and value is not None:
                raise ConfigError(
                    f"{self._where}: {key}={json.dumps(value)[:200]} is not understood for this model_type; "
                    "a key that is not understood is refused, because ignoring it could change the output"
                )

    def _get(self, key: str, default: object) -> object:
        self._read.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ConfigError(f"{self._where}: {key} is missing")
        return default
