"""On 60 held-out prompts speculative text is the plain text, or the target alone says otherwise.

Blocks have a fixed width here, so that drafts are verified whatever a measurement would choose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import dspine
from dspine.drafters.dspine import DSpineDrafter
from dspine.engine.compare import Answer, explain
from dspine.engine.engine import Engine
from dspine.engine.llama_target import LlamaTarget
from dspine.engine.replay import first_difference
from dspine.engine.rollback import TrimRollback
from dspine.files.drafter_file import read_drafter
from dspine.llama.context import Context
from dspine.llama.model import load_safely
from tests.support.default_pair import (
    TASKS,
    NotingTarget,
    Outcome,
    decoded_alone,
    fitting_threads,
    held_out,
    respond,
)
from tests.support.tiny_pair import write_pair_drafter

TOKENS = 128
DRAFTS = 3
NEAR_TIE = 3.0
"""Rounding moves a logit by up to 1.3 between batch shapes, and a gap has two of them."""


@dataclass(frozen=True)
class Way:
    """Who proposes, on how many prompts of each task, and the length of an answer."""

    name: str
    prompts: int
    tokens: int


WAYS = (Way("auto", 20, TOKENS), Way("dspine", 3, TOKENS), Way("noise", 3, 24))
"""`noise` is a drafter with random weights."""


@dataclass(frozen=True)
class Rig:
    """Engines that share one context, and plain decoding on a context without any drafter."""

    engines: dict[str, Engine]
    target: NotingTarget
    plain: Engine
    alone: NotingTarget

    def speculate(self, name: str, prompt: str, max_tokens: int) -> Outcome:
        return respond(self.engines[name], self.target, prompt, max_tokens=max_tokens)

    def decode_plainly(self, prompt: str, max_tokens: int = TOKENS) -> Outcome:
        return respond(self.plain, self.alone, prompt, max_tokens=max_tokens)


@pytest.fixture(scope="module")
def rig(
    default_target: Path, default_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    with ExitStack() as stack:
        loaded = stack.enter_context(
            dspine.load(
                default_target,
                default_drafter,
                n_ctx=1024,
                spec_draft_n_max=DRAFTS,
                calibrate=False,
            )
        )
        parts = loaded._parts
        assert isinstance(parts.target, LlamaTarget)
        assert isinstance(parts.drafter, DSpineDrafter)
        context = parts.target.context
        target = NotingTarget(context)
        threads = fitting_threads(context)
        parts.drafter.set_threads(threads)

        noise_file = write_pair_drafter(
            tmp_path_factory.mktemp("noise") / "noise.gguf",
            default_target,
            taps=read_drafter(default_drafter).config.taps,
            draft_vocab_size=4096,
        )
        noise = stack.enter_context(
            DSpineDrafter.load(noise_file, context.model, n_ctx=context.n_ctx, n_threads=threads)
        )
        model = stack.enter_context(load_safely(default_target))
        untouched = stack.enter_context(
            Context(
                model,
                n_ctx=context.n_ctx,
                n_batch=context.n_batch,
                n_threads=threads,
                flash_attention=context.flash_attention,
                max_outputs=context.max_outputs,
            )
        )
        alone = NotingTarget(untouched)
        engines = {
            "auto": Engine(replace(parts, target=target)),
            "dspine": Engine(replace(parts, target=target, proposer="dspine")),
            "noise": Engine(replace(parts, target=target, proposer="dspine", drafter=noise)),
        }
        plain = Engine(replace(parts, target=alone, proposer="none", drafter=None))
        yield Rig(engines, target, plain, alone)


@dataclass(frozen=True)
class Row:
    """One speculative answer, and where it leaves the plain one, if it does."""

    prompt_id: str
    plain: Outcome
    outcome: Outcome
    parts_at: int | None
    choices: tuple[int | None, int | None] = (None, None)
    """There: the plain token and the speculative one, None for an answer that had ended."""
    gaps: tuple[float, float] | None = None
    """Logit of each one's own choice minus that of the other's, in its own batch."""


def cut(outcome: Outcome, count: int) -> Answer:
    """A plain answer as it would have been with `max_tokens` of `count`."""
    answer = outcome.answer
    if count >= len(answer.tokens):
        return answer
    text = "".join(step.text for step in outcome.steps[:count])
    return Answer(answer.tokens[:count], text, "length", answer.stats)


def compare(rig: Rig, way: Way, prompt_id: str, prompt: str, plain: Outcome) -> Row:
    """A speculative answer; where it parts from the plain one the target alone must do so too."""
    found = rig.speculate(way.name, prompt, way.tokens)
    expected, answer = cut(plain, way.tokens), found.answer
    assert answer.stats.disabled_reason is None
    at = first_difference(expected.tokens, answer.tokens)
    if at is None:
        assert answer.reason == expected.reason
        # A shorter plain answer may have held text back that this one gave at its end.
        assert answer.text.startswith(expected.text)
        assert answer.text == expected.text or expected is not plain.answer
        return Row(prompt_id, plain, found, None)
    again = decoded_alone(rig.alone, rig.plain.encode(prompt), found)
    assert again == list(answer.tokens), f"{prompt_id} parts at {at}, the target alone does not"
    slow, fast = (a.tokens[at] if at < len(a.tokens) else None for a in (expected, answer))
    if slow is None or fast is None:
        return Row(prompt_id, plain, found, at, (slow, fast))
    here, there = plain.logits[at], found.logits[at]
    assert fast in here and slow in there, f"{prompt_id}: the other token is far from being chosen"
    gaps = (here[slow] - here[fast], there[fast] - there[slow])
    assert all(0 <= gap < NEAR_TIE for gap in gaps), (prompt_id, gaps)
    return Row(prompt_id, plain, found, at, (slow, fast), gaps)


@pytest.mark.parametrize("task", TASKS)
def test_speculative_answers_are_the_plain_ones_or_the_targets_own(
    rig: Rig, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, list[Row]] = {way.name: [] for way in WAYS}
    for index, item in enumerate(held_out(task)):
        plain = rig.decode_plainly(item.prompt)
        assert {len(step.tokens) for step in plain.trace.steps} == {1}
        for way in WAYS:
            if index < way.prompts:
                rows[way.name].append(compare(rig, way, item.id, item.prompt, plain))
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{line}" for line in report(rig, task, rows)))

    for way in WAYS:
        assert len(rows[way.name]) == way.prompts
        for row in rows[way.name]:
            check_widths(row.outcome, way)
    for row in [row for row in rows["auto"] if row.gaps is not None][:1]:
        check_explanation(rig, row)
    assert accepted(rows["dspine"], "dspine") > 0
    assert accepted(rows["auto"], "dspine") > 0
    assert accepted(rows["auto"], "ngram") > 0
    assert acceptance_length(rows["dspine"]) > 1.2
    assert acceptance_length(rows["auto"]) > 1.2


def check_explanation(rig: Rig, row: Row) -> None:
    """What `--compare` would say of a difference is what was found here."""
    told = explain(
        rig.target,
        TrimRollback(rig.target),
        (row.plain.answer, row.plain.trace),
        (row.outcome.answer, row.outcome.trace),
    )
    assert told is not None
    assert told.reproduced
    assert told.position == row.parts_at
    assert (told.plain_token, told.speculative_token) == row.choices
    assert (told.plain_gap, told.speculative_gap) == pytest.approx(row.gaps, abs=1e-4)


def check_widths(outcome: Outcome, way: Way) -> None:
    """The drafter was asked for every block as wide as it may be; repeats may be shorter."""
    emitted = 0
    for step, record in zip(outcome.steps, outcome.trace.steps, strict=True):
        assert len(record.tokens) == 1 + step.drafted
        room = min(DRAFTS, way.tokens - emitted - 1)
        assert step.drafted == room or (step.proposer == "ngram" and 0 < step.drafted < room)
        emitted += len(step.tokens)


def accepted(rows: list[Row], proposer: str) -> int:
    shares = [row.outcome.answer.stats.proposers.get(proposer) for row in rows]
    return sum(share.accepted for share in shares if share)


def acceptance_length(rows: list[Row]) -> float:
    stats = [row.outcome.answer.stats for row in rows]
    return sum(s.tokens for s in stats) / sum(s.steps for s in stats)


def report(rig: Rig, task: str, rows: dict[str, list[Row]]) -> Iterator[str]:
    """A line for each way, and one for each answer that is not the plain one."""
    for name, compared in rows.items():
        parted = [row for row in compared if row.parts_at is not None]
        stats = [row.outcome.answer.stats for row in compared]
        yield (
            f"{task}, {name}: {len(compared) - len(parted)} of {len(compared)} answers are the "
            f"plain ones, acceptance length {acceptance_length(compared):.2f}, "
            f"{sum(s.accepted for s in stats)} of {sum(s.drafted for s in stats)} drafts accepted"
        )
        for row in parted:
            slow, fast = (shown(rig, token) for token in row.choices)
            gaps = "" if row.gaps is None else f" (gaps {row.gaps[0]:.4f} and {row.gaps[1]:.4f})"
            yield (
                f"  {row.prompt_id} parts at token {row.parts_at}: plain {slow}, speculative "
                f"{fast}{gaps}; the target alone decodes the same"
            )


def shown(rig: Rig, token: int | None) -> str:
    if token is None:
        return "has ended"
    piece = rig.engines["auto"].tokenizer.piece(token, special=True)
    return repr(piece.decode(errors="replace"))


def test_a_prompt_beyond_the_window_of_the_drafter_is_drafted_for(
    rig: Rig, default_drafter: Path
) -> None:
    window = read_drafter(default_drafter).config.context_window
    assert window is not None and window < 900
    prompt = "\n\n".join(item.prompt for item in held_out("mt-bench"))
    while len(rig.plain.encode(prompt)) > window + 100:
        prompt = prompt[: int(0.95 * len(prompt))]
    assert len(rig.plain.encode(prompt)) > window
    way = Way("dspine", 1, 24)
    row = compare(rig, way, "long", prompt, rig.decode_plainly(prompt, way.tokens))
    check_widths(row.outcome, way)


def test_the_times_of_a_step_add_up_to_those_of_a_clock_outside(rig: Rig) -> None:
    for name in ("dspine", "auto"):
        outcomes = [rig.speculate(name, item.prompt, 48) for item in held_out("mt-bench", 2)]
        steps = [step for outcome in outcomes for step in outcome.steps]
        parts = sum(step.draft_ms + step.verify_ms + step.host_ms for step in steps)
        stats = [outcome.answer.stats for outcome in outcomes]
        assert parts == pytest.approx(sum(s.wall_ms for s in stats), rel=0.05)
        assert parts == pytest.approx(sum(outcome.outside_ms for outcome in outcomes), rel=0.05)
        assert sum(s.draft_ms for s in stats) > 0 < sum(s.verify_ms for s in stats)
