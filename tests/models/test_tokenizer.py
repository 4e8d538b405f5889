from typing import Any

import pytest

from coli_server.models.dense import read_gguf
from coli_server.models.tokenizer import build_tokenizer, tokenizer_config


@pytest.fixture
def vocabulary(tiny: Any) -> Any:
    return read_gguf(tiny.gguf).vocabulary


def test_merges_apply_in_order_and_bytes_are_the_floor(vocabulary: Any) -> None:
    encoded = build_tokenizer(vocabulary).encode("tell the hello")
    assert encoded.tokens == ["t", "e", "ll", "Ġthe", "Ġ", "he", "ll", "o"]


def test_ids_are_the_places_in_the_source_vocabulary(vocabulary: Any) -> None:
    tokenizer = build_tokenizer(vocabulary)
    assert tokenizer.get_vocab_size() == len(vocabulary.tokens)
    assert all(tokenizer.token_to_id(token) == i for i, token in enumerate(vocabulary.tokens))


def test_digits_stand_alone(vocabulary: Any) -> None:
    assert build_tokenizer(vocabulary).encode("a 2025").tokens == ["a", "Ġ", "2", "0", "2", "5"]


def test_control_tokens_are_single_ids(vocabulary: Any) -> None:
    encoded = build_tokenizer(vocabulary).encode("<|im_start|>the<|im_end|>")
    assert encoded.ids[0] == vocabulary.bos
    assert encoded.ids[-1] == vocabulary.eos


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n\t x", "naïve café", "日本語", "🙂👩‍👩‍👧", "a\u0301", "\x00\x7f", "  two  spaces  "],
)
def test_any_text_comes_back(vocabulary: Any, text: str) -> None:
    tokenizer = build_tokenizer(vocabulary)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_configuration_names_tokens_and_template(vocabulary: Any) -> None:
    config = tokenizer_config(vocabulary, 128)
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"] == vocabulary.chat_template
    assert config["added_tokens_decoder"]["2"]["content"] == "<|im_end|>"
