"""Lets the target answer prompts: the text that a drafter should learn to predict."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dspine.errors import UsageError
from dspine.llama.model import Model, load_safely
from dspine.machine import physical_cores
from dspine.train.generation import Generator, Job, check_draws, common_prefix
from dspine.train.line_file import LineFile, cut_incomplete_line, make_ready
from dspine.train.progress import JobProgress
from dspine.train.prompts import Prompt, PromptEncoder, read_prompts
from dspine.train.records import Record, is_begun_line, read_records
from dspine.train.target_copy import check_weights, weights_file

_WHAT = "answers"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """One answer file. A prompt's first answer may be greedy, further ones are drawn."""

    target: Path
    prompts: tuple[Path, ...]
    output: Path
    """JSON-lines file; a run adds what it lacks."""
    skip: tuple[Path, ...] = ()
    """Answer files whose prompts are left out."""
    sources: tuple[str, ...] = ()
    """Only prompts of these sources; empty: all."""
    answers_per_prompt: int = 1
    limit: int | None = None
    """At most so many answers in the file."""
    greedy_share: float = 0.6
    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 256
    max_prompt_tokens: int = 220
    system: str | None = None
    slots: int = 48
    seed: int = 0
    threads: int | None = None
    flash_attention: bool = True
    weights: str | None = None
    """Generate with a copy of the target whose weights have this type (f16, f32, bf16)."""


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """What one run made."""

    answers: int
    tokens: int
    ended: int
    """Answers that the target ended itself."""
    too_long: int
    """Prompts left out because of `max_prompt_tokens`."""
    seconds: float


def generate_answers(options: AnswerOptions) -> AnswerReport:
    """Add answers to `output` until every chosen prompt has its share; resumes where it stopped.

    Each line is written when its answer ends; the file is synchronised every few lines.
    """
    _check(options)
    threads = options.threads or physical_cores()
    torch.set_num_threads(threads)
    make_ready(options.output, _WHAT)
    path = weights_file(options.target, options.weights, options.output.parent, threads=threads)
    with load_safely(path) as model:
        present = _cut_incomplete_line(options.output, model.vocab_size)
        jobs, prompts, too_long = _jobs(options, model, present)
        generator = Generator(
            model,
            slots=min(options.slots, max(len(jobs), 1)),
            max_prompt_tokens=options.max_prompt_tokens,
            max_tokens=options.max_tokens,
            shared_prefix=common_prefix([job.prompt for job in jobs]),
            n_threads=threads,
            flash_attention=options.flash_attention,
        )
        ended = made = 0
        try:
            with (
                JobProgress("answers", len(jobs), unit="answers") as progress,
                LineFile(options.output, _WHAT) as file,
            ):
                for job, answer in generator.run(jobs):
                    prompt_id, _, number = job.key.rpartition("#")
                    prompt = prompts[prompt_id]
                    file.append(
                        Record(
                            id=prompt.id,
                            temperature=job.temperature,
                            prompt=np.array(job.prompt, dtype=np.int32),
                            answer=np.array(answer, dtype=np.int32),
                            source=prompt.source,
                            number=int(number),
                        ).to_line()
                    )
                    made += 1
                    ended += model.tokenizer.is_end(answer[-1])
                    rate = generator.tokens / max(progress.seconds, 1e-9)
                    progress.advance(1, f"{generator.tokens:,} tokens, {rate:,.0f} tokens/s")
                return AnswerReport(made, generator.tokens, ended, too_long, progress.seconds)
        finally:
            generator.close()


def _check(options: AnswerOptions) -> None:
    if not options.prompts:
        raise UsageError("no prompt file: name one or several with --prompts FILE")
    for name in ("answers_per_prompt", "max_tokens", "max_prompt_tokens", "slots"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name} is {getattr(options, name)}: it must be at least 1")
    if not 0 <= options.greedy_share <= 1:
        raise UsageError(f"greedy_share is {options.greedy_share}: it must lie in 0 ... 1")
    check_draws(options.temperature, options.top_p, "; greedy answers are what greedy_share is for")
    check_weights(options.weights)


def _cut_incomplete_line(path: Path, vocab_size: int) -> set[str]:
    """Keys of the answers in the file so far; a last line without its end is removed."""
    # Read first: a file that holds something else is refused as it is.
    present = {_key(r.id, r.number) for r in read_records([path], vocab_size=vocab_size)}
    cut_incomplete_line(path, _WHAT, is_begun_line)
    return present


def _jobs(
    options: AnswerOptions, model: Model, present: set[str]
) -> tuple[list[Job], dict[str, Prompt], int]:
    """What is left to do in shuffled order, the prompts by id, and how many are too long."""
    skip = {r.id for r in read_records(options.skip, vocab_size=model.vocab_size)}
    encoder = PromptEncoder(model, system=options.system)
    prompts: dict[str, Prompt] = {}
    jobs: list[Job] = []
    too_long = 0
    for prompt in read_prompts(options.prompts):
        if prompt.id in skip or (options.sources and prompt.source not in options.sources):
            continue
        if prompt.id in prompts:
            raise UsageError(
                f"prompt id {prompt.id} stands in the prompt files twice: make the ids different"
            )
        tokens = tuple(encoder.encode(prompt.text))
        if len(tokens) > options.max_prompt_tokens:
            too_long += 1
            continue
        prompts[prompt.id] = prompt
        jobs += _answers_of(prompt, tokens, options, present)
    random.Random(options.seed).shuffle(jobs)
    if options.limit is not None:
        jobs = jobs[: max(options.limit - len(present), 0)]
    return jobs, prompts, too_long


def _answers_of(
    prompt: Prompt, tokens: tuple[int, ...], options: AnswerOptions, present: set[str]
) -> Iterator[Job]:
    for number in range(options.answers_per_prompt):
        key = _key(prompt.id, number)
        if key in present:
            continue
        # Decided by id and number, so that a resumed run decides the same.
        digest = hashlib.sha256(f"{options.seed}/{key}".encode()).digest()
        draw = int.from_bytes(digest[:4], "little")
        greedy = number == 0 and draw < options.greedy_share * 2**32
        yield Job(
            key=key,
            prompt=tokens,
            temperature=0.0 if greedy else options.temperature,
            top_p=options.top_p,
            seed=draw,
        )


def _key(prompt_id: str, number: int) -> str:
    return f"{prompt_id}#{number}"
