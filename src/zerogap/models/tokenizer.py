"""Text to token ids and back, from the tokenizer files of a Hugging Face folder.

Encoding and decoding use the ``tokenizers`` library directly; transformers is loaded only to render a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from zerogap.errors import UsageError, nearest


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a model folder.

    Raises:
        UsageError: ``tokenizer.json`` is missing or unreadable, or an end-of-sequence id is not a token id.
    """
    return Tokenizer(Path(folder))


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        folder: the model folder it was read from.
        stop_ids: the model's end-of-sequence ids, from generation_config.json, config.json and
            tokenizer_config.json in that order, each once.
        vocab_size: number of tokens, added ones included; a model's logits may be wider.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fast = _read_fast(folder)
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self.stop_ids: tuple[int, ...] = self._read_stop_ids()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with the tokens the model puts around raw text (often a start token)."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that form no character become U+FFFD."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        if any((self.folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
            return True
        return bool(_read_json(self.folder / "tokenizer_config.json").get("chat_template"))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation up to where the assistant's next message begins.

        Args:
            messages: ``{"role": ..., "content": ...}`` each, at least one.

        Raises:
            UsageError: the model has no chat template, a message is malformed, or the template refuses them.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of which `encode_chat` returns the tokens; same arguments and errors."""
        if not self.has_chat_template:
            raise UsageError(
                f"model {str(self.folder)!r} has no chat template: give plain prompts, or add a chat_template.jinja"
            )
        if not messages:
            raise UsageError("a conversation needs at least one message")
        for i, message in enumerate(messages):
            for field in ("role", "content"):
                if not isinstance(message, Mapping) or not isinstance(message.get(field), str):
                    raise UsageError(f"message {i} of the conversation needs a text field {field!r}")
        import jinja2

        try:
            text: str = self._chat.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"the chat template of {str(self.folder)!r} refuses the messages: {reason}") from error
        return text

    @cached_property
    def _chat(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever a malformed file trips over
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"the tokenizer files of {str(self.folder)!r} do not load: {reason}") from error

    def _read_stop_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            found += _token_ids(_read_json(self.folder / name).get("eos_token_id"), self.folder / name)
        token = _read_json(self.folder / "tokenizer_config.json").get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and (i := self._fast.token_to_id(content)) is not None:
            found.append(i)
        return tuple(dict.fromkeys(found))


def _read_fast(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        raise UsageError(
            f"no tokenizer.json in {str(folder)!r}{nearest('tokenizer.json', names)}: "
            "save it there with transformers' AutoTokenizer.save_pretrained"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is not a readable tokenizer ({reason}): fetch or save it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}): fetch or save it again") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} holds no JSON object: fetch or save it again")
    return value


def _token_ids(value: object, path: Path) -> list[int]:
    """Return the ids of an ``eos_token_id`` entry: absent, one id, or a list of them."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    ids = [i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    if len(ids) < len(values):
        raise UsageError(f"eos_token_id in {path} holds {value!r}: give a token id or a list of them")
    return ids
