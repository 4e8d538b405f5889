"""Text to token ids and back, and the model's own chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from coli_server.engine.chat_template import ChatTemplate, TextError
from coli_server.errors import ColiError, ModelError

Message = Mapping[str, str]

# Some publishers do not mark the tokens of turns as special: <|user|>, or with wide bars <｜User｜>.
_MARKUP = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


class Text:
    """The tokenizer of a model folder. All methods may be called from any thread.

    Text of users never becomes a control token: `encode` splits the text of special tokens like any
    other text. Only the chat template itself writes control tokens.
    """

    def __init__(
        self, tokenizer: str, config: Mapping[str, object], template: str | None, where: str = "chat_template"
    ) -> None:
        """`tokenizer` is the text of tokenizer.json, `config` tokenizer_config.json, `where` names the file
        of the chat `template`. Raises ModelError."""
        self._control = Tokenizer.from_str(tokenizer)
        added = self._control.get_added_tokens_decoder()
        control = {id: token.content for id, token in added.items() if _is_control(token)}
        self._plain = Tokenizer.from_str(_with_specials(tokenizer, frozenset(control.values())))
        for each in (self._control, self._plain):
            each.no_truncation()
            each.no_padding()
        self._plain.encode_special_tokens = True
        self._control_ids = frozenset(control)
        self._control_texts = tuple(sorted(filter(None, control.values()), key=len, reverse=True))
        self._control_text = re.compile("|".join(map(re.escape, self._control_texts)) or r"(?!)")
        self._bos = self._bos_to_add(config)
        self._names = {
            name: _token_text(value)
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        self._template = None if template is None else ChatTemplate(template, where, self._names)

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face folder."""
        path = folder / "tokenizer.json"
        try:
            tokenizer = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}; a model folder needs its tokenizer.json") from None
        config_path = folder / "tokenizer_config.json"
        config: object = {}
        if config_path.exists():
            try:
                config = json.loads(config_path.read_bytes())
            except ValueError as error:
                raise ModelError(f"{config_path}: not readable as JSON: {error}") from None
        if not isinstance(config, dict):
            raise ModelError(f"{config_path}: expected a JSON object")
        try:
            return cls(tokenizer, config, *_find_template(folder, config))
        except ColiError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot read
            raise ModelError(f"{path}: not a tokenizer: {str(error)[:200]}") from None

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._control.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a user's text, with the tokenizer's own beginning-of-text rule."""
        if self._control_ids.isdisjoint(self._plain.encode(text, add_special_tokens=False).ids):
            ids = list(self._plain.encode(text, add_special_tokens=True).ids)
        else:  # the vocabulary itself holds the text of a control token
            before, after = self._frame()
            ids = [*before, *self._harmless(text), *after]
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    @property
    def beginning(self) -> int:
        """The token that stands before a text which nothing precedes: beginning-of-text, else end-of-text.

        Raises TextError for a tokenizer that names neither.
        """
        for name in ("bos_token", "eos_token"):
            token = self._control.token_to_id(self._names.get(name, ""))
            if token is not None:
                return int(token)
        raise TextError("the context is empty, and this model has no token for the beginning of a text")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a dialogue, ready for the assistant's next turn.

        While the template runs, marks stand for the texts of control tokens that messages hold. Afterwards
        those texts are tokenized apart from the rest, so that only the template writes control tokens.

        Raises TextError when there is no chat template or when the template refuses the dialogue.
        """
        if self._template is None:
            raise TextError("this model has no chat template; use GEN")
        opening = _unused_mark([*(message["content"] for message in messages), self._template.source])
        marked = [
            {
                **message,
                "content": self._control_text.sub(
                    lambda found: f"{opening}{self._control_texts.index(found[0])}\ue001", message["content"]
                ),
            }
            for message in messages
        ]
        rendered = self._template.render(marked)
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"{re.escape(opening)}(\\d+)\ue001", rendered)):
            if i % 2:
                ids += self._harmless(self._control_texts[int(piece)])
            elif piece:
                ids += self._control.encode(piece, add_special_tokens=False).ids
        return ids

    def _harmless(self, text: str) -> list[int]:
        """Token ids of `text` without a control token among them, whatever the vocabulary holds."""
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if self._control_ids.isdisjoint(ids):
            return ids
        if len(text) < 2:
            return [id for id in ids if id not in self._control_ids]
        half = len(text) // 2
        return self._harmless(text[:half]) + self._harmless(text[half:])

    def _frame(self) -> tuple[list[int], list[int]]:
        """What the tokenizer's post-processor puts before and behind a text."""
        bare = self._plain.encode("a", add_special_tokens=False).ids
        full = self._plain.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:at], full[at + len(bare) :]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens left out."""
        return str(self._control.decode(list(ids), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """The text of one token by itself (half characters show as U+FFFD), control tokens included."""
        return str(self._control.decode([token], skip_special_tokens=False))

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """A decoder of the tokens that follow `prompt`."""
        return TextStream(self._control, prompt)

    def _bos_to_add(self, config: Mapping[str, object]) -> int | None:
        """The id that `add_bos_token` asks for and the post-processor does not already add."""
        if config.get("add_bos_token") is not True or config.get("bos_token") is None:
            return None
        bos = self._control.token_to_id(_token_text(config["bos_token"]))
        return None if bos is None else int(bos)


class TextStream:
    """Turns tokens into text one by one; a character comes out only when all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The last few prompt tokens are context: whether a piece begins with a blank depends on them.
        self._stream = DecodeStream(ids=list(prompt[-8:]), skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Text that `token` completes; may be empty."""
        self._pending.append(token)
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """What is left of an unfinished character: U+FFFD once, or nothing."""
        text = str(self._tokenizer.decode(self._pending, skip_special_tokens=True))
        self._pending.clear()
        return "\ufffd" if "\ufffd" in text else ""


def _token_text(value: object) -> str:
    """The text of a special token, which tokenizer_config.json gives as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content", "")
    return value if isinstance(value, str) else ""


def _is_control(token: AddedToken) -> bool:
    """Whether an added token steers the model: marked as special, or written like markup of turns."""
    return token.special or _MARKUP.fullmatch(token.content) is not None


def _with_specials(tokenizer: str, texts: frozenset[str]) -> str:
    """tokenizer.json in which the added tokens `texts` are marked as special."""
    document = json.loads(tokenizer)
    for token in document.get("added_tokens") or ():
        token["special"] = token["special"] or token["content"] in texts
    return json.dumps(document)


def _unused_mark(texts: Sequence[str]) -> str:
    """The beginning of a mark that none of `texts` holds."""
    number = 0
    while any(f"\ue000{number}." in text for text in texts):
        number += 1
    return f"\ue000{number}."


def _find_template(folder: Path, config: Mapping[str, object]) -> tuple[str | None, str]:
    """The chat template of a folder, if it has one, and the file that it is in."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: not readable as text: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None, str(folder / "tokenizer_config.json")
