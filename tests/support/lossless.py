"""Answers of the default pair beside plain ones, as facts for a test to judge; a program.

    python -m tests.support.lossless TARGET DRAFTER FOLDER PROMPTS_OF_A_TASK TASK...

prints one JSON object; FOLDER has what `write_noise` writes. It runs in a process of its own,
because which kernels compute is decided once a process, and on one thread, so that several fit
side by side. Blocks have a fixed width, whatever a measurement would choose.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dspine
from dspine.drafters.dspine import DSpineDrafter
from dspine.drafters.kinds import AnyDrafter, open_drafter
from dspine.engine.choose import GreedyChooser
from dspine.engine.compare import explain
from dspine.engine.engine import Engine
from dspine.engine.llama_target import LlamaTarget
from dspine.engine.replay import first_difference
from dspine.engine.rollback import TrimRollback
from dspine.files.drafter_file import read_drafter
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import load_safely
from tests.support.default_pair import (
    TASKS,
    NotingTarget,
    Outcome,
    decoded_alone,
    held_out,
    respond,
)
from tests.support.tiny_pair import write_dflash_drafter, write_pair_drafter

DRAFTS = 3


@dataclass(frozen=True)
class Way:
    """Who proposes, on how many prompts of each task at most, and the length of an answer."""

    name: str
    prompts: int
    tokens: int


WAYS = (
    Way("auto", 20, 128),
    Way("dspine", 3, 128),
    Way("noise", 3, 24),
    Way("noise-dflash", 2, 16),
    Way("noise-dflash2", 2, 16),
)
"""`noise` are drafters with random weights, the first one of DSpine."""

LONGEST = max(way.tokens for way in WAYS)


@dataclass(frozen=True)
class Rig:
    """Engines that share one context, and plain decoding on a context without any drafter."""

    engines: dict[str, Engine]
    target: NotingTarget
    plain: Engine
    alone: NotingTarget
    window: int | None
    """Of the drafter."""

    def speculate(self, name: str, prompt: str, max_tokens: int) -> Outcome:
        return respond(self.engines[name], self.target, prompt, max_tokens=max_tokens)

    def decode_plainly(self, prompt: str, max_tokens: int) -> Outcome:
        return respond(self.plain, self.alone, prompt, max_tokens=max_tokens)


def write_noise(folder: Path, target_file: Path, drafter_file: Path) -> None:
    """Drafters with random weights, of every kind, beside the one of the pair."""
    taps = read_drafter(drafter_file).config.taps
    write_pair_drafter(folder / "noise.gguf", target_file, taps=taps, draft_vocab_size=4096)
    for kind in ("DFlash", "DFlash2"):
        path = folder / f"noise-{kind.lower()}.gguf"
        write_dflash_drafter(path, target_file, kind, taps=taps, draft_vocab_size=4096)


@contextmanager
def open_rig(target_file: Path, drafter_file: Path, folder: Path) -> Iterator[Rig]:
    options: dict[str, Any] = {
        "n_ctx": 1024,
        "n_threads": 1,
        "spec_draft_n_max": DRAFTS,
        "calibrate": False,
    }
    with ExitStack() as stack:
        loaded = stack.enter_context(dspine.load(target_file, drafter_file, **options))
        parts = loaded._parts
        assert isinstance(parts.target, LlamaTarget)
        assert isinstance(parts.drafter, DSpineDrafter)
        context = parts.target.context
        target = NotingTarget(context)
        config = read_drafter(drafter_file).config
        noises: dict[str, AnyDrafter] = {}
        for path in sorted(folder.glob("noise*.gguf")):
            opened = open_drafter(
                read_drafter(path), context.model, n_ctx=context.n_ctx, n_threads=1
            )
            noises[path.stem] = stack.enter_context(opened)
        untouched = stack.enter_context(
            Context(
                stack.enter_context(load_safely(target_file)),
                n_ctx=context.n_ctx,
                n_batch=context.n_batch,
                n_threads=1,
                flash_attention=context.flash_attention,
                max_outputs=context.max_outputs,
            )
        )
        alone = NotingTarget(untouched)
        engines = {
            "auto": Engine(replace(parts, target=target)),
            "dspine": Engine(replace(parts, target=target, proposer="dspine")),
            **{
                name: Engine(replace(parts, target=target, proposer="dspine", drafter=drafter))
                for name, drafter in noises.items()
            },
        }
        plain = Engine(replace(parts, target=alone, proposer="none", drafter=None))
        yield Rig(engines, target, plain, alone, config.context_window)


def compare(rig: Rig, way: Way, name: str, prompt: str, plain: Outcome) -> dict[str, Any]:
    """One speculative answer and, where it leaves the plain one, what the target alone does.

    `parts_at` is None for equal tokens. `gaps` are each one's own choice's logit minus that of the
    other's choice, in its own batch; None where an answer had ended. `reproduced` says that the
    target alone gives every token of this answer in the same batches.
    """
    found = rig.speculate(way.name, prompt, way.tokens)
    answer, stats = found.answer, found.answer.stats
    expected = plain.answer.tokens[: way.tokens]
    whole = len(plain.answer.tokens) <= way.tokens
    at = first_difference(expected, answer.tokens)
    facts: dict[str, Any] = {
        "id": name,
        "way": way.name,
        "parts_at": at,
        "same_end": not whole or answer.reason == plain.answer.reason,
        "same_text": not whole or answer.text == plain.answer.text,
        "disabled": stats.disabled_reason,
        "steps": stats.steps,
        "tokens": stats.tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_by": {who: share.accepted for who, share in stats.proposers.items()},
        "narrow": narrow_steps(found, way),
        "parts_ms": sum(step.draft_ms + step.verify_ms + step.host_ms for step in found.steps),
        "wall_ms": stats.wall_ms,
        "outside_ms": found.outside_ms,
    }
    if at is None:
        return facts
    again = decoded_alone(rig.alone, rig.plain.encode(prompt), found)
    slow, fast = (t[at] if at < len(t) else None for t in (expected, answer.tokens))
    gaps = None
    if slow is not None and fast is not None:
        here, there = plain.logits[at], found.logits[at]
        # A token that is not even among the best noted ones is as far away as can be.
        gaps = [here[slow] - here.get(fast, -1e9), there[fast] - there.get(slow, -1e9)]
    return facts | {
        "reproduced": again == list(answer.tokens),
        "choices": [shown(rig, token) for token in (slow, fast)],
        "gaps": gaps,
    }


def narrow_steps(outcome: Outcome, way: Way) -> int:
    """Steps in which the drafter was asked for less than had room; repeats may be short."""
    emitted = narrow = 0
    for step, record in zip(outcome.steps, outcome.trace.steps, strict=True):
        assert len(record.tokens) == 1 + step.drafted
        room = min(DRAFTS, way.tokens - emitted - 1)
        short_repeat = step.proposer in ("ngram", "table") and 0 < step.drafted < room
        narrow += step.drafted != room and not short_repeat
        emitted += len(step.tokens)
    return narrow


def shown(rig: Rig, token: int | None) -> str:
    if token is None:
        return "the end"
    piece = rig.plain.tokenizer.piece(token, special=True)
    return repr(piece.decode(errors="replace"))


def explained(rig: Rig, prompt: str) -> dict[str, Any] | None:
    """What `--compare` says of a prompt."""
    plain = rig.decode_plainly(prompt, LONGEST)
    found = rig.speculate("auto", prompt, LONGEST)
    told = explain(
        rig.target,
        TrimRollback(rig.target),
        (plain.answer, plain.trace),
        (found.answer, found.trace),
        lambda: GreedyChooser(rig.target),
    )
    return None if told is None else told.to_json()


def beyond_the_window(rig: Rig) -> dict[str, Any]:
    """A prompt that is longer than the drafter can look back."""
    assert rig.window is not None
    prompt = "\n\n".join(item.prompt for item in held_out("mt-bench"))
    while len(rig.plain.encode(prompt)) > rig.window + 100:
        prompt = prompt[: int(0.95 * len(prompt))]
    way = Way("dspine", 1, 24)
    return {
        **compare(rig, way, "long", prompt, rig.decode_plainly(prompt, way.tokens)),
        "prompt_tokens": len(rig.plain.encode(prompt)),
        "window": rig.window,
    }


def main(
    target: Path, drafter: Path, folder: Path, count: int, tasks: Sequence[str]
) -> dict[str, Any]:
    """The long prompt is there once, with the last of all tasks."""
    rows = []
    with open_rig(target, drafter, folder) as rig:
        parted = None
        for task in tasks:
            for index, item in enumerate(held_out(task, count)):
                plain = rig.decode_plainly(item.prompt, LONGEST)
                for way in WAYS:
                    if index < way.prompts:
                        row = compare(rig, way, item.id, item.prompt, plain)
                        rows.append({"task": task, **row})
                        if parted is None and row["parts_at"] is not None and row["gaps"]:
                            parted = (row, item.prompt)
        return {
            "kernels": find_library().kernels.family,
            "rows": rows,
            "long": beyond_the_window(rig) if TASKS[-1] in tasks else None,
            "parted": parted and parted[0],
            "explained": parted and explained(rig, parted[1]),
        }


if __name__ == "__main__":
    target, drafter, folder = map(Path, sys.argv[1:4])
    found = main(target, drafter, folder, int(sys.argv[4]), sys.argv[5:])
    sys.stdout.write(json.dumps(found) + "\n")
