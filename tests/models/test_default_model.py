"""The real default model, pulled once into the user's cache. This is the real path: no fixture stands in."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from coli_server.engine import Engine
from coli_server.models import DEFAULT_MODEL, cache_folder
from coli_server.models.evaluate import dense_folder
from coli_server.models.pull import is_complete

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(17, 2025))",
    "Fellow citizens of the Senate and House of Representatives:\n\n\tIt's   100% naïve — 日本語 🙂",
]


@pytest.fixture(scope="module")
def source(default_model: Path) -> Path:
    """The GGUF that the model was carved from, kept by the pull."""
    path = cache_folder() / "downloads" / DEFAULT_MODEL.source.file_name
    assert default_model.exists()
    assert path.stat().st_size == DEFAULT_MODEL.source.size
    return path


@pytest.fixture(scope="module")
def reference(source: Path, dense_reference: Callable[[Path], Any]) -> Any:
    return dense_reference(source)


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Iterator[Engine]:
    engine = Engine.open(default_model, ram="6G")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


def test_the_carving_with_all_experts_at_weight_one_equals_the_dense_model(
    reference: Any, tokenizer: Tokenizer
) -> None:
    with dense_folder() as folder:
        engine = Engine.open(folder, ram="6G", experts_per_layer=None)
        for text in TEXTS:
            ids = tokenizer.encode(text).ids
            np.testing.assert_allclose(engine.logits(ids), reference.logits(ids), rtol=0, atol=1e-3)
        engine.close()


def test_eight_of_sixteen_experts_change_the_logits_but_rarely_the_best_token(
    engine: Engine, reference: Any, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" ".join(TEXTS)).ids
    carved, dense = engine.logits(ids), reference.logits(ids)
    assert np.abs(carved - dense).max() > 0.1
    assert np.mean(carved.argmax(-1) == dense.argmax(-1)) > 0.6


def test_the_model_answers_a_plain_question(engine: Engine) -> None:
    ids = engine.text.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = engine.generate(ids, 48)
    assert len(answer) < 48  # it stops by itself
    assert "Paris" in engine.text.decode(answer)


def test_every_file_has_the_checksum_of_the_manifest(default_model: Path) -> None:
    assert is_complete(default_model, DEFAULT_MODEL, verify=True)


@pytest.fixture(scope="module")
def metadata(source: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(source).fields
    return {key: fields[f"tokenizer.{key}"].contents() for key in ("ggml.tokens", "chat_template")}


@pytest.fixture(scope="module")
def vocabulary(metadata: dict[str, Any]) -> list[str]:
    return list(metadata["ggml.tokens"])


def test_every_id_is_the_source_vocabulary_s(tokenizer: Tokenizer, vocabulary: list[str]) -> None:
    assert tokenizer.get_vocab_size() == len(vocabulary) == 49152
    assert [tokenizer.id_to_token(i) for i in range(49152)] == vocabulary


# Ids of the published SmolLM2 tokenizer.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("<|im_start|>user\n<|im_end|>", [1, 4093, 198, 2]),
        (" 2025", [216, 34, 32, 34, 37]),
    ],
)
def test_known_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text).ids == ids


@pytest.mark.parametrize("seed", range(20))
def test_any_text_comes_back(tokenizer: Tokenizer, vocabulary: list[str], seed: int) -> None:
    dice = random.Random(seed)
    letters = "abc XYZ.,'0123456789\n\t éß日本語🙂\u0301\u200d"
    text = "".join(dice.choice(letters) for _ in range(200)) + dice.choice(TEXTS)
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert [vocabulary[i] for i in encoded.ids] == encoded.tokens
    assert not any(len(token.lstrip("Ġ")) > 1 and any(c.isdigit() for c in token) for token in encoded.tokens)


def test_the_chat_template_is_the_source_s(default_model: Path, metadata: dict[str, Any]) -> None:
    template = metadata["chat_template"]
    assert (default_model / "chat_template.jinja").read_text() == template
    assert json.loads((default_model / "tokenizer_config.json").read_text())["chat_template"] == template
