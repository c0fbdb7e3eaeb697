"""Lets the target write prompts itself: what its chat template has before a user's message is
continued as if the user were about to type.

For a model without a prompt set at hand, such as a fine-tune. That aligned models then write what
they were trained to be asked was published as Magpie (arXiv 2406.08464).
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dspine.errors import TrainingError, UsageError
from dspine.files.atomic import reason
from dspine.llama.model import load_safely
from dspine.machine import physical_cores
from dspine.train.generation import Generator, Job, check_draws, common_prefix
from dspine.train.line_file import LineFile, cut_incomplete_line, make_ready
from dspine.train.progress import JobProgress
from dspine.train.prompts import PromptEncoder, read_prompts
from dspine.train.target_copy import check_weights, weights_file

SOURCE = "self"
_WHAT = "prompts"
_LEAST_WORDS = 3
_ALIKE_WORDS = 8
_MOST_TRIES = 8
"""Prompts begun for each one that is wanted; a target that is worse than that is given up."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class OwnPromptOptions:
    """One prompt file; a run adds what it lacks of `count`."""

    target: Path
    output: Path
    count: int = 1000
    openings: Path | None = None
    """Text file; each line begins a prompt, \\n in it is a line feed. None: nothing is given."""
    unlike: tuple[str, ...] = ()
    """Texts of which no prompt may repeat eight words in a row: what acceptance is measured on."""
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 160
    """Longer prompts are left out, as are those that the target does not end."""
    system: str | None = None
    slots: int = 48
    seed: int = 0
    threads: int | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class OwnPromptReport:
    """What one run made."""

    prompts: int
    unended: int
    repeated: int
    """Too short, there already, or like a text of `unlike`."""
    seconds: float


def write_prompts(options: OwnPromptOptions) -> OwnPromptReport:
    """Add prompts to `output` until it has `count`; the same call resumes where it stopped.

    Raises UsageError for a target without a chat template, TrainingError where too few of the
    prompts that it begins can be used.
    """
    _check(options)
    openings = _read_openings(options.openings)
    threads = options.threads or physical_cores()
    torch.set_num_threads(threads)
    make_ready(options.output, _WHAT)
    known = _Known(options.unlike)
    next_number = _read_present(options.output, known)
    wanted = options.count - known.count
    if wanted <= 0:
        return OwnPromptReport(0, 0, 0, 0.0)
    path = weights_file(options.target, options.weights, options.output.parent, threads=threads)
    with load_safely(path) as model:
        before = PromptEncoder(model, system=options.system).before_user()
        begun = [model.tokenizer.encode(before + o, parse_special=True) for o in openings]
        generator = Generator(
            model,
            slots=min(options.slots, wanted),
            max_prompt_tokens=max(map(len, begun)),
            max_tokens=options.max_tokens,
            shared_prefix=common_prefix(begun),
            n_threads=threads,
        )
        jobs = _jobs(options, [tuple(tokens) for tokens in begun], next_number)
        unended = tries = made = 0
        try:
            with (
                JobProgress("prompts", wanted, unit="prompts") as progress,
                LineFile(options.output, _WHAT) as file,
            ):
                for job, written in generator.run(jobs):
                    tries += 1
                    text = openings[_opening(job, len(openings))] + model.tokenizer.decode(written)
                    if not model.tokenizer.is_end(written[-1]):
                        unended += 1
                    elif known.add(text := text.strip()):
                        file.append(_line(job.key, text))
                        made += 1
                        progress.advance(1, f"{tries:,} begun")
                    if made == wanted:
                        break
                    if tries == _MOST_TRIES * max(wanted, options.slots):
                        raise TrainingError(
                            f"of {tries} prompts that {options.target.name} began only {made} can "
                            f"be used ({unended} were not ended within {options.max_tokens} "
                            f"tokens): give openings with --openings, or prompts of your own"
                        )
                return OwnPromptReport(made, unended, tries - made - unended, progress.seconds)
        finally:
            generator.close()


class _Known:
    """Texts that a new prompt must not repeat."""

    def __init__(self, unlike: Sequence[str]) -> None:
        self._unlike = {run for text in unlike for run in _runs(text)}
        self._prompts: set[str] = set()

    @property
    def count(self) -> int:
        """Prompts so far."""
        return len(self._prompts)

    def add(self, text: str) -> bool:
        """Whether it is a prompt, a new one, and unlike the texts to be avoided."""
        words = _words(text)
        plain = " ".join(words)
        if len(words) < _LEAST_WORDS or plain in self._prompts:
            return False
        if not self._unlike.isdisjoint(_runs(text)):
            return False
        self._prompts.add(plain)
        return True


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(text: str) -> Iterator[str]:
    """All runs of eight words; a shorter text is one run."""
    words = _words(text)
    for first in range(max(1, len(words) - _ALIKE_WORDS + 1)):
        yield " ".join(words[first : first + _ALIKE_WORDS])


def _jobs(options: OwnPromptOptions, begun: Sequence[tuple[int, ...]], first: int) -> Iterator[Job]:
    for number in itertools.count(first):
        # By seed and number, so that a resumed run begins what another would have.
        seed = random.Random(f"{options.seed}/{number}").getrandbits(31)
        job = Job(f"{SOURCE}-{number}", (), options.temperature, options.top_p, seed)
        yield replace(job, prompt=begun[_opening(job, len(begun))])


def _opening(job: Job, count: int) -> int:
    return job.seed % count


def _line(identity: str, text: str) -> str:
    fields = {"id": identity, "source": SOURCE, "prompt": text}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")) + "\n"


def _is_begun_line(data: bytes) -> bool:
    begin = f'{{"id":"{SOURCE}-'.encode()
    return begin.startswith(data[: len(begin)])


def _read_present(path: Path, known: _Known) -> int:
    """Tell `known` of the prompts in the file; the number after the last one's."""
    last = -1
    # Read first: a file that holds something else is refused as it is.
    for prompt in read_prompts([path], only_ended=True):
        known.add(prompt.text)
        name, _, number = prompt.id.rpartition("-")
        if name != SOURCE or not number.isdecimal():
            raise TrainingError(
                f"{path} holds prompts of another origin (id {prompt.id}): name another file to "
                f"write the target's own ones to"
            )
        last = max(last, int(number))
    cut_incomplete_line(path, _WHAT, _is_begun_line)
    return last + 1


def _read_openings(path: Path | None) -> list[str]:
    """Lines of the file, one opening each; a single empty one without a file."""
    if path is None:
        return [""]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"openings {path} cannot be read ({why}): check the path") from error
    lines = text.removesuffix("\n").split("\n")
    # A blank at the end would keep the next word from being the token it usually is.
    return [line.replace("\\n", "\n").rstrip(" ") for line in lines]


def _check(options: OwnPromptOptions) -> None:
    for name in ("count", "max_tokens", "slots"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name} is {getattr(options, name)}: it must be at least 1")
    why = ": prompts are drawn, or all would be the same"
    check_draws(options.temperature, options.top_p, why)
    check_weights(options.weights)
