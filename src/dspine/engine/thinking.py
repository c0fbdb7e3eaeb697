"""Says once where a prompt wants reasoning and the drafter was trained without it, or reverse."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dspine.engine.prompt import TokenizerLike
from dspine.text.reasoning import expects_thoughts

log = logging.getLogger("dspine")

TAIL = 16
"""Tokens at the end of a prompt that hold the marks a template writes there."""

TOLD = (
    "this prompt asks for an answer {wanted} reasoning, and the drafter's file says that it was "
    "trained on text {trained} it: expect fewer accepted drafts; adapt it on such answers "
    "(`dspine train fit --init-from`), or if the file is wrong write it anew "
    "(`dspine convert --thinking {flag}`)"
)


class ThinkingMode:
    """Compares what prompts ask for with what the drafter knows."""

    def __init__(self, trained: bool | None, template: str) -> None:
        """`trained`: whether the drafter was trained on reasoning, None where nobody said or there
        is none; `template`: the text of the target's chat template.
        """
        self._trained = trained
        self._template = template

    def look(self, tokens: Sequence[int], tokenizer: TokenizerLike) -> None:
        """A prompt that the template made. The first one of the other mode is told to the log."""
        trained = self._trained
        if trained is None:
            return
        pieces = (tokenizer.piece(token, special=True) for token in tokens[-TAIL:])
        end = b"".join(pieces).decode("utf-8", "replace")
        wanted = expects_thoughts(end, self._template)
        if wanted is None or wanted is trained:
            return
        self._trained = None
        words = {True: "with", False: "without"}
        flag = "on" if wanted else "off"
        log.warning("%s", TOLD.format(wanted=words[wanted], trained=words[trained], flag=flag))
