"""Text to token ids and back, and the model's own chat template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coli_server.errors import ColiError, ModelError

Message = Mapping[str, str]


class TextError(ColiError):
    """A text or a dialogue that this model's tokenizer or chat template cannot take."""

    code: ClassVar[str] = "BAD_REQUEST"


class Text:
    """The tokenizer of a model folder. All methods may be called from any thread.

    Text of users never becomes a control token: `encode` splits the text of special tokens like any
    other text. Only the chat template itself writes control tokens.
    """

    def __init__(self, tokenizer: str, config: Mapping[str, object], template: str | None) -> None:
        self._control = Tokenizer.from_str(tokenizer)
        self._plain = Tokenizer.from_str(tokenizer)
        for each in (self._control, self._plain):
            each.no_truncation()
            each.no_padding()
        self._plain.encode_special_tokens = True
        self._specials = tuple(
            token.content for token in self._control.get_added_tokens_decoder().values() if token.special
        )
        self._bos = self._bos_to_add(config)
        self._names = {
            name: _token_text(config[name]) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name) is not None
        }  # fmt: skip
        self._template = None if template is None else compile_template(template)

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
            return cls(tokenizer, config, _find_template(folder, config))
        except ColiError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot read
            raise ModelError(f"{path}: not a tokenizer: {str(error)[:200]}") from None

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._control.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a user's text, with the tokenizer's own beginning-of-text rule."""
        ids = list(self._plain.encode(text, add_special_tokens=True).ids)
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

        Raises TextError when there is no chat template or when the template refuses the dialogue.
        """
        if self._template is None:
            raise TextError("this model has no chat template; use GEN")
        texts, marks = [dict(message) for message in messages], {}
        for number, message in enumerate(texts):
            if any(special in message["content"] for special in self._specials):
                # A mark stands for the text while the template runs, so that the text is tokenized apart.
                mark = f"\ue000{number}\ue001"
                marks[mark] = message["content"].strip()
                message["content"] = mark
        rendered = self._render(texts)
        ids: list[int] = []
        for mark, content in marks.items():
            before, found, rendered = rendered.partition(mark)
            if not found:
                continue  # the template drops this turn (earlier reasoning, say)
            ids += self._control.encode(before, add_special_tokens=False).ids
            ids += self._plain.encode(content, add_special_tokens=False).ids
        ids += self._control.encode(rendered, add_special_tokens=False).ids
        return ids

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

    def _render(self, messages: list[dict[str, str]]) -> str:
        assert self._template is not None
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except jinja2.exceptions.TemplateError as error:
            raise TextError(f"the chat template refuses this dialogue: {str(error)[:200]}") from None
        except (TypeError, ValueError, OverflowError, MemoryError) as error:
            raise TextError(f"the chat template failed: {type(error).__name__}: {str(error)[:200]}") from None


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


class _TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja2's sandbox with the helpers that published chat templates use."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)


def compile_template(source: str) -> jinja2.Template:
    """A chat template that runs in a sandbox. Raises ModelError if it is not valid Jinja2."""
    try:
        return _TemplateEnvironment().from_string(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise ModelError(f"the chat template is not valid (line {error.lineno}): {error.message}") from None


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _token_text(value: object) -> str:
    """The text of a special token, which tokenizer_config.json gives as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content", "")
    return value if isinstance(value, str) else ""


def _find_template(folder: Path, config: Mapping[str, object]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
