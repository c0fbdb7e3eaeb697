"""From what a caller passes as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

from dspine.errors import UsageError
from dspine.text.chat_template import ChatTemplate, Message

Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]
"""Text, a list of chat messages, or token ids."""


class TokenizerLike(Protocol):
    """The part of a tokenizer that prompts need."""

    vocab_size: int
    bos: int

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token, empty for control tokens unless `special`."""


def encode_prompt(
    prompt: Prompt,
    tokenizer: TokenizerLike,
    template: ChatTemplate | None,
    *,
    raw: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt; text is one user message unless `raw` or without a template.

    Raises UsageError for an empty prompt, for messages without a chat template, and for token
    ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise UsageError("the prompt is empty: give some text")
        if raw or template is None:
            return tokenizer.encode(prompt, add_special=True, parse_special=True)
        return _render([{"role": "user", "content": prompt}], tokenizer, template, variables)
    items = list(prompt)
    if not items:
        raise UsageError("the prompt is empty: give text, messages or token ids")
    if all(isinstance(item, Mapping) for item in items):
        if template is None:
            raise UsageError(
                "this target has no chat template: give one (--chat-template) or a raw text (--raw)"
            )
        return _render(cast("list[Message]", items), tokenizer, template, variables)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise UsageError(
                f"the prompt holds {item!r}: a list must be all messages or all token ids"
            )
        if not 0 <= item < tokenizer.vocab_size:
            raise UsageError(
                f"token id {item} is outside the vocabulary of {tokenizer.vocab_size} tokens: "
                "tokenize the text with this target"
            )
    return cast("list[int]", items)


def _render(
    messages: Sequence[Message],
    tokenizer: TokenizerLike,
    template: ChatTemplate,
    variables: Mapping[str, Any] | None,
) -> list[int]:
    text = template.render(messages, **dict(variables or {}))
    # Some templates write the begin token themselves; it must not come twice.
    begin = token_text(tokenizer, tokenizer.bos)
    twice = bool(begin) and text.startswith(begin)
    tokens = tokenizer.encode(text, add_special=not twice, parse_special=True)
    if not tokens:
        raise UsageError("the chat template made an empty prompt of this: give some content")
    return tokens


def token_text(tokenizer: TokenizerLike, token: int) -> str:
    """Text of a token, control tokens included; empty for -1 (the vocabulary has none)."""
    return tokenizer.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
