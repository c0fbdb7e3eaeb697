"""What the target is asked, and plain text to learn from, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspine.errors import FileError, UsageError
from dspine.llama.model import Model
from dspine.text.chat_template import TEMPLATE_KEY, ChatTemplate
from dspine.train.records import UNKNOWN_SOURCE, Record, lines


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    text: str
    source: str = UNKNOWN_SOURCE
    licence: str = "unknown"


def read_prompts(paths: Sequence[Path], *, only_ended: bool = False) -> Iterator[Prompt]:
    """Every prompt of JSON-lines files (fields id, prompt, and if known source and licence).

    `only_ended` leaves out a last line without its line feed, which a writer was stopped in.
    """
    for path in paths:
        for number, line in enumerate(lines(path, only_ended=only_ended), start=1):
            try:
                fields = json.loads(line)
                text = fields["prompt"]
                if not isinstance(text, str) or not text.strip():
                    raise ValueError("the prompt is empty")
                yield Prompt(
                    id=str(fields["id"]),
                    text=text,
                    source=str(fields.get("source", UNKNOWN_SOURCE)),
                    licence=str(fields.get("licence", "unknown")),
                )
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise FileError(
                    f"{path} line {number} is not a prompt ({error}): each line needs id and prompt"
                ) from error


class PromptEncoder:
    """Prompt text -> token ids as a chat user would have them; plain text without a template."""

    def __init__(self, model: Model, *, system: str | None = None) -> None:
        self._tokenizer = model.tokenizer
        self._name = model.path.name
        self._system = system
        source = model.metadata(TEMPLATE_KEY)
        self._template = None
        if source is not None:
            self._template = ChatTemplate(
                source, bos=self._special(model, "bos"), eos=self._special(model, "eos")
            )

    def encode(self, text: str) -> list[int]:
        """Token ids up to where the answer begins."""
        if self._template is None:
            return self._tokenizer.encode(text, add_special=True)
        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        return self._tokenizer.encode(self._template.render(messages), parse_special=True)

    def before_user(self) -> str:
        """What stands before a user's message; UsageError where no template says that."""
        mark = "dspine's user writes here"
        if self._template is None:
            raise UsageError(
                f"{self._name} has no chat template, so that it cannot write as a user: give "
                f"prompts of your own"
            )
        messages = [{"role": "user", "content": mark}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        before, found, _ = self._template.render(messages).partition(mark)
        if not found:
            raise UsageError(
                f"the chat template of {self._name} does not show the user's message as it is: "
                f"give prompts of your own"
            )
        return before

    def _special(self, model: Model, name: str) -> str:
        token = getattr(model.tokenizer, name)
        if token is None or token < 0:
            return ""
        return model.tokenizer.piece(token, special=True).decode("utf-8", "replace")


def text_records(model: Model, paths: Sequence[Path], *, max_tokens: int) -> Iterator[Record]:
    """Plain text files cut into sequences of `max_tokens`; every token but the first is a label.

    Temperature 1 stands for text that the target did not write.
    """
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise FileError(f"text {path} cannot be read: {reason}") from error
        tokens = np.asarray(model.tokenizer.encode(text), dtype=np.int32)
        for start in range(0, len(tokens) - 1, max_tokens):
            yield Record(
                id=f"{path.name}+{start}",
                temperature=1.0,
                prompt=np.zeros(0, dtype=np.int32),
                answer=tokens[start : start + max_tokens],
                source="text",
            )
