"""An engine on the fakes: a byte tokenizer, a scripted target, a scripted drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dspine.engine.engine import Engine, EngineParts
from dspine.engine.width import FixedWidth, WidthPolicy
from dspine.text.chat_template import ChatTemplate
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget, FakeTargets

BOS, EOS = 256, 257
VOCAB = 258


class ByteTokenizer:
    """Token ids 0 ... 255 are bytes, then begin and end."""

    vocab_size = VOCAB
    bos = BOS

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        tokens: list[int] = [BOS] if add_special else []
        for index, part in enumerate(text.split("<s>") if parse_special else [text]):
            tokens += [BOS, *part.encode()] if index else [*part.encode()]
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token >= BOS:
            return (b"<s>", b"</s>")[token - BOS] if special else b""
        return bytes([token])

    def is_end(self, token: int) -> bool:
        return token == EOS


def make_engine(
    target: FakeTarget,
    drafter: FakeDrafter | None = None,
    *,
    drafts: int = 3,
    template: str | None = None,
    **parts: Any,
) -> Engine:
    return Engine(
        EngineParts(
            model_path=Path("target.gguf"),
            target=target,
            tokenizer=parts.pop("tokenizer", ByteTokenizer()),
            policy=FixedWidth({"dspine": drafts, "ngram": drafts}),
            proposer=parts.pop("proposer", "dspine" if drafter else "ngram"),
            template=ChatTemplate(template, bos="<s>") if template else None,
            drafter=drafter,
            max_positions=1000,
            **parts,
        )
    )


def make_parallel(
    targets: Sequence[FakeTarget],
    drafter: FakeDrafter | None = None,
    *,
    make_policy: Callable[[], WidthPolicy] | None = None,
    **parts: Any,
) -> EngineParts:
    """Parts of an engine with as many sequences as there are targets."""
    make_policy = make_policy or (lambda: FixedWidth({"dspine": 3, "ngram": 3}))
    return EngineParts(
        model_path=Path("target.gguf"),
        target=targets[0],
        tokenizer=parts.pop("tokenizer", ByteTokenizer()),
        policy=make_policy(),
        proposer=parts.pop("proposer", "dspine" if drafter else "ngram"),
        drafter=drafter,
        max_positions=1000,
        together=FakeTargets(targets, n_batch=64 * len(targets)),
        make_policy=make_policy,
        **parts,
    )
