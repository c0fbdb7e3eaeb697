"""The engine: owns target, drafter and their memory, and runs one generation at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dspine.engine.compare import Answer, Comparison, explain
from dspine.engine.events import Event, Finish, FinishReason, Step, TokenLogprob
from dspine.engine.held import HeldFacts
from dspine.engine.loop import Run, Stepper, generate
from dspine.engine.parts import EngineParts as EngineParts
from dspine.engine.parts import EngineTokenizer as EngineTokenizer
from dspine.engine.parts import ProposerName as ProposerName
from dspine.engine.parts import TargetFacts
from dspine.engine.prompt import Prompt
from dspine.engine.request import AnswerOptions, Requests
from dspine.engine.rollback import RollbackMode
from dspine.engine.sampling import SamplingOptions, comparable
from dspine.engine.scheduler import Scheduler
from dspine.engine.sequence import common_prefix
from dspine.engine.session_file import SavedSession, check_made_with
from dspine.engine.slots import make_slot
from dspine.engine.stats import Stats
from dspine.engine.trace import Trace
from dspine.engine.width import WidthPlan
from dspine.errors import CapacityError, ClosedError, FileError, UsageError
from dspine.measured import Calibration
from dspine.text.chat_template import Message
from dspine.text.grammar import GrammarOptions


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token; None when not asked for."""


class Engine:
    """Answers prompts with a target, faster where drafts pay, with the same text.

    One generation at a time; not for several threads at once. Close it, or use it in `with`.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._closed = False
        self._busy = False
        self._slot = make_slot(parts)
        self._held = self._slot.held
        self._requests = Requests(parts)

    @classmethod
    def load(
        cls, model: str | Path | None = None, drafter: str | Path | None = None, **options: Any
    ) -> Engine:
        """Load a pair from files; `dspine.load` has the same options and describes them."""
        from dspine.engine.load import load

        return load(model, drafter, **options)

    # -- facts -----------------------------------------------------------------------------------

    @property
    def model_path(self) -> Path:
        """The target's file."""
        return self._parts.model_path

    @property
    def target_facts(self) -> TargetFacts | None:
        """Its sizes; None where the engine was not made from files."""
        return self._parts.facts

    @property
    def drafter_path(self) -> Path | None:
        """The drafter's file, also when it does not draft."""
        return self._parts.drafter_path

    @property
    def n_ctx(self) -> int:
        """Positions of prompt and answer together."""
        return self._parts.target.n_ctx

    @property
    def slots(self) -> int:
        """How many requests a `scheduler` can answer at once."""
        return self._parts.n_slots

    @property
    def plan(self) -> WidthPlan | None:
        """What the calibration chose, None when widths were given."""
        return self._parts.plan

    @property
    def calibration(self) -> Calibration | None:
        """The times behind `plan`, None when nothing was measured."""
        return self._parts.calibration

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences worth showing once."""
        return self._parts.notices

    @property
    def proposer(self) -> str:
        """Who proposes: auto, ngram, none, or the kind of the drafter, as in dflash2."""
        return self._slot.proposer.name

    @property
    def rollback(self) -> RollbackMode:
        """How rejected drafts leave the target's memory: trim, snapshots or checkpoint."""
        return self._parts.rollback or ("checkpoint" if self._parts.is_recurrent else "trim")

    @property
    def rollback_reason(self) -> str:
        """Why it is that mode; empty where nobody chose."""
        return self._parts.rollback_reason

    @property
    def disabled_reason(self) -> str | None:
        """Why the drafter does not draft although there is one."""
        return self._parts.disabled_reason or self._slot.proposer.disabled_reason

    @property
    def held(self) -> HeldFacts:
        """What the memory holds for the next prompt to begin with."""
        return self._held.facts

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The target's tokenizer."""
        return self._parts.tokenizer

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self._requests.end_tokens

    @property
    def template_source(self) -> str:
        """The chat template as it is written; empty without one."""
        return self._parts.template.source if self._parts.template else ""

    # -- generation ------------------------------------------------------------------------------

    def encode(
        self, prompt: Prompt, *, raw: bool = False, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a prompt: text (one user message unless `raw`), messages, or token ids."""
        self._check_open()
        return self._requests.encode(prompt, raw=raw, variables=variables)

    def prompt_text(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """What the target's chat template makes of messages, as text."""
        if self._parts.template is None:
            raise UsageError("this target has no chat template: give the prompt as text")
        return self._parts.template.render(messages, **variables)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        stop: Sequence[str] = (),
        grammar: GrammarOptions | None = None,
        logprobs: int | None = None,
        plain: bool = False,
        raw: bool = False,
        variables: Mapping[str, Any] | None = None,
        sampling: SamplingOptions | None = None,
        cancel: threading.Event | None = None,
        trace: Trace | None = None,
        cache_prompt: bool = True,
        max_drafts: int | None = None,
        max_thoughts: int | None = None,
    ) -> Iterator[Event]:
        """Events of one answer: Prefill, Steps, Finish.

        `max_tokens` None means until the answer ends or the context is full; of the first
        `min_tokens` none ends it. `plain` decodes
        without drafts. `sampling` says how tokens are drawn (default: the most likely ones).
        `grammar` restricts the whole answer; an end token may come where it is complete, so an
        answer cut by `max_tokens` ("length") may not be. `logprobs` asks for the log-probability
        of each token and of that many best ones (`TokenLogprob`). `variables` reach the chat
        template. Setting `cancel`, or Ctrl-C while a step runs, ends with Finish("cancelled").
        `trace` collects what was decoded together. `cache_prompt`: what the memory holds of this
        prompt from the answer before is not decoded again (with a `trace` everything is).
        `max_drafts` bounds the drafts of each step, however many are thought to pay; where a
        fixed number was given (`spec_draft_n_max`) it stands for that number, up to the drafter's
        block. `max_thoughts` bounds the tokens of thoughts between <think> marks: then only the
        closing mark may follow. All options are checked at once, before the first event is asked
        for.
        """
        tokens = self.encode(prompt, raw=raw, variables=variables)
        options = AnswerOptions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop,
            grammar=grammar,
            logprobs=logprobs,
            plain=plain,
            sampling=sampling,
            cancel=cancel,
            trace=trace,
            cache_prompt=cache_prompt,
            max_drafts=max_drafts,
            max_thoughts=max_thoughts,
        )
        run = self._requests.run(tokens, self._slot.target, options)
        return self._exclusive(run, self._requests.stepper(run, self._slot, plain=options.plain))

    def complete(self, prompt: Prompt, **options: Any) -> Result:
        """`generate` to the end; same options."""
        return _collect(self.generate(prompt, **options))

    def check_grammar(self, grammar: GrammarOptions) -> None:
        """UsageError for a grammar that answers cannot follow, before anything is answered."""
        self._requests.check_grammar(grammar)

    def compare(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        grammar: GrammarOptions | None = None,
        raw: bool = False,
        variables: Mapping[str, Any] | None = None,
        sampling: SamplingOptions | None = None,
        max_thoughts: int | None = None,
        cancel: threading.Event | None = None,
        on_start: Callable[[str], None] | None = None,
    ) -> Comparison:
        """Answer plainly, then speculatively; a difference is explained by the target alone.

        `on_start` hears "plain" and "speculative" when that answer begins. Where tokens are
        drawn, both answers have the same seed, and drafts are judged by `match`.
        """
        sampling = comparable(sampling or SamplingOptions())
        tokens = self.encode(prompt, raw=raw, variables=variables)
        answers: list[tuple[Answer, Trace]] = []
        for plain in (True, False):
            if on_start is not None:
                on_start("plain" if plain else "speculative")
            trace = Trace()
            result = _collect(
                self.generate(
                    prompt,
                    max_tokens=max_tokens,
                    stop=stop,
                    grammar=grammar,
                    plain=plain,
                    raw=raw,
                    variables=variables,
                    sampling=sampling,
                    max_thoughts=max_thoughts,
                    cancel=cancel,
                    trace=trace,
                )
            )
            answer = Answer(result.tokens, result.text, result.reason, result.stats)
            answers.append((answer, trace))
        divergence = None
        if all(answer.reason != "cancelled" for answer, _ in answers):
            self._held.forget()  # the explanation decodes on its own
            divergence = explain(
                self._parts.target,
                self._slot.rollback,
                answers[0],
                answers[1],
                lambda: self._requests.chooser(
                    self._parts.target, sampling, tokens, grammar, max_thoughts=max_thoughts
                ),
            )
        return Comparison(answers[0][0], answers[1][0], divergence)

    def save_memory(self, wanted: Sequence[int] | None = None) -> SavedSession:
        """What target and drafter hold, without messages; `load_memory` puts it back.

        With `wanted` only if at least half of what is held is its beginning, else nothing.
        """
        self._check_idle()
        tokens, state, checkpoints = self._held.save()
        if wanted is not None and 2 * common_prefix(tokens, wanted) < len(tokens):
            return SavedSession(made_with=self._parts.made_with)
        drafter = self._parts.drafter
        return SavedSession(
            made_with=self._parts.made_with,
            tokens=tokens,
            state=state,
            checkpoints=checkpoints,
            drafter=None if drafter is None else drafter.save_context(0),
        )

    def load_memory(self, saved: SavedSession) -> None:
        """Hold what was saved; the next prompt reuses what it shares with it.

        Raises FileError when it was saved by another target or other settings, CapacityError
        when it does not fit; what is held stays then. A context of another drafter is left out.
        """
        self._check_idle()
        check_made_with(saved.made_with, self._parts.made_with)
        if len(saved.tokens) > self.n_ctx:
            raise CapacityError(
                f"the saved session holds {len(saved.tokens)} tokens, the context has "
                f"{self.n_ctx}: raise the context size (-c)"
            )
        if not saved.tokens:
            return
        if max(saved.tokens) >= self._parts.tokenizer.vocab_size or min(saved.tokens) < 0:
            raise FileError(
                "the saved session has tokens that this target does not know: load it with the "
                "target that it was saved with, or start a new session"
            )
        try:
            self._held.load(saved.tokens, saved.state, saved.checkpoints)
        except UsageError as error:
            raise FileError(
                f"the saved session does not fit this target: {error}; load it with the target "
                "that it was saved with, or start a new session"
            ) from error
        drafter, made_with = self._parts.drafter, self._parts.made_with
        same = saved.made_with.get("drafter") == made_with.get("drafter")
        if drafter is not None and saved.drafter is not None and same:
            drafter.load_context(0, saved.drafter)

    def scheduler(self, n_slots: int | None = None) -> Scheduler:
        """Answers several requests at once, on `n_slots` sequences (default: all there are).

        The engine itself answers nothing until the scheduler is closed, and forgets what it holds.
        """
        self._check_idle()
        scheduler = Scheduler(
            self._parts,
            self.slots if n_slots is None else n_slots,
            requests=self._requests,
            on_close=self._take_back,
        )
        self._held.forget()
        self._busy = True
        return scheduler

    def _take_back(self) -> None:
        self._busy = False

    def close(self) -> None:
        """Free target and drafter; later use raises ClosedError."""
        if not self._closed:
            self._closed = True
            self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exclusive(self, run: Run, stepper: Stepper) -> Iterator[Event]:
        """One generation at a time: they share the target's memory."""
        self._check_idle()
        self._busy = True
        settled = False
        try:
            for event in generate(run, stepper, self._held):
                yield event
                self._check_open()
            settled = True
        except GeneratorExit:
            settled = not self._closed  # the caller has enough; between two steps all is settled
            raise
        finally:
            self._busy = False
            run.chooser.close()
            if settled:
                self._held.end(run.sequence.tokens)
            else:
                self._held.forget()

    def _check_idle(self) -> None:
        self._check_open()
        if self._busy:
            raise UsageError(
                "another answer of this engine is still running: read it to its end or close() it"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this engine is closed: load it again")


def _collect(events: Iterator[Event]) -> Result:
    text: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    asked = False
    finish: Finish | None = None
    for event in events:
        if isinstance(event, Step):
            text.append(event.text)
            tokens.extend(event.tokens)
            if event.logprobs is not None:
                asked = True
                logprobs.extend(event.logprobs)
        elif isinstance(event, Finish):
            finish = event
    assert finish is not None, "every generation ends with Finish"
    return Result(
        "".join(text),
        tuple(tokens),
        finish.reason,
        finish.stats,
        tuple(logprobs) if asked else None,
    )
