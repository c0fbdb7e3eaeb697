"""From a prompt and the options of one answer to what the loops run on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from dspine.engine.choose import Chooser, Constraint, GreedyChooser
from dspine.engine.emit import Emitter
from dspine.engine.least_tokens import LeastTokens
from dspine.engine.logprobs import LogprobRecorder
from dspine.engine.loop import Run, Stepper, check_fits
from dspine.engine.parts import EngineParts, EngineTokenizer
from dspine.engine.plain import PlainStepper
from dspine.engine.prompt import Prompt, encode_prompt
from dspine.engine.sampling import SamplingChooser, SamplingOptions
from dspine.engine.sequence import TokenSequence
from dspine.engine.slots import Slot
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.target import Target
from dspine.engine.thinking import ThinkingMode
from dspine.engine.thought_limit import Marks, ThoughtLimit
from dspine.engine.trace import Trace
from dspine.errors import UsageError
from dspine.text.grammar import GrammarOptions
from dspine.text.matcher import Grammars


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of one answer; `Engine.generate` describes them."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    grammar: GrammarOptions | None = None
    logprobs: int | None = None
    plain: bool = False
    sampling: SamplingOptions | None = None
    cancel: threading.Event | None = None
    trace: Trace | None = None
    cache_prompt: bool = True
    max_drafts: int | None = None
    max_thoughts: int | None = None
    tells_reading: bool = False
    """Whether the scheduler tells of parts of the prompt (`Reading`)."""


class Requests:
    """Checks prompts and options and makes runs of them."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._grammars = Grammars(parts.tokenizer)
        template = parts.template.source if parts.template else ""
        self._mode = ThinkingMode(parts.trained_on_thoughts, template)

    def encode(
        self, prompt: Prompt, *, raw: bool = False, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a prompt, as `Engine.encode`."""
        parts = self._parts
        tokens = encode_prompt(
            prompt, parts.tokenizer, parts.template, raw=raw, variables=variables or {}
        )
        if parts.template is not None and not (raw or tokens == prompt):
            self._mode.look(tokens, parts.tokenizer)
        return tokens

    def check_grammar(self, grammar: GrammarOptions) -> None:
        """UsageError for a grammar that answers cannot follow."""
        self._grammars.matcher(grammar)

    def run(self, tokens: Sequence[int], target: Target, options: AnswerOptions) -> Run:
        """Everything an answer on `target` works on.

        Raises UsageError for options that cannot be, CapacityError for a prompt that does not fit.
        """
        parts = self._parts
        check_fits(tokens, target)
        if options.max_drafts is not None and options.max_drafts < 0:
            raise UsageError(f"max_drafts is {options.max_drafts}: it must be at least 0")
        if options.min_tokens < 0:
            raise UsageError(f"min_tokens is {options.min_tokens}: it must be at least 0")
        if options.min_tokens and options.grammar is not None:
            raise UsageError(
                f"min_tokens is {options.min_tokens}, and a grammar says where the answer ends: "
                f"leave out one of the two"
            )
        if options.max_thoughts is not None:
            self._check_thoughts(options)
        scores = None
        if options.logprobs is not None:
            scores = LogprobRecorder(options.logprobs, parts.tokenizer.vocab_size)
        return Run(
            target,
            TokenSequence(tokens),
            Emitter(
                parts.tokenizer.piece,
                parts.tokenizer.is_end,
                max_tokens=options.max_tokens,
                stop=options.stop,
            ),
            self.chooser(
                target,
                options.sampling or SamplingOptions(),
                tokens,
                options.grammar,
                scores,
                min_tokens=options.min_tokens,
                max_thoughts=options.max_thoughts,
            ),
            cancel=options.cancel or threading.Event(),
            trace=options.trace,
            reuse=options.cache_prompt and options.trace is None,
            logprobs=scores,
            max_drafts=options.max_drafts,
            tells_reading=options.tells_reading,
        )

    def _check_thoughts(self, options: AnswerOptions) -> None:
        if (options.max_thoughts or 0) < 0:
            raise UsageError(f"max_thoughts is {options.max_thoughts}: it must be at least 0")
        for name, given in (("a grammar", options.grammar), ("min_tokens", options.min_tokens)):
            if given:
                raise UsageError(
                    f"max_thoughts is {options.max_thoughts} beside {name}, and an answer follows "
                    f"one constraint: leave out one of the two"
                )

    def stepper(self, run: Run, slot: Slot, *, plain: bool) -> Stepper:
        """How `run`, which works on the slot's target, makes its steps."""
        disabled = self._parts.disabled_reason
        if plain or (slot.proposer.name == "none" and not disabled):
            return PlainStepper(run)
        return SpeculativeStepper(
            run, slot.proposer, slot.policy, slot.rollback, disabled_reason=disabled
        )

    def chooser(
        self,
        target: Target,
        sampling: SamplingOptions,
        prompt: Sequence[int],
        grammar: GrammarOptions | None,
        scores: LogprobRecorder | None = None,
        *,
        min_tokens: int = 0,
        max_thoughts: int | None = None,
    ) -> Chooser:
        """The request's way from the rows of `target` to tokens."""
        make = self._parts.make_sampler
        constraint: Constraint | None = None
        if grammar is not None:
            constraint = self._grammars.matcher(grammar)
        elif min_tokens:
            constraint = LeastTokens(min_tokens, self.end_tokens)
        elif max_thoughts is not None:
            constraint = self._thought_limit(max_thoughts, prompt)
        if sampling.is_greedy:
            return GreedyChooser(target, constraint=constraint, listener=scores)
        if make is None:
            raise UsageError("this engine cannot sample: ask for temperature 0 and no penalties")
        return SamplingChooser(
            target,
            make(sampling, prompt),
            sampling,
            len(prompt),
            constraint=constraint,
            listener=scores,
        )

    def _thought_limit(self, limit: int, prompt: Sequence[int]) -> ThoughtLimit | None:
        tokenizer, template = self._parts.tokenizer, self._parts.template
        marks = Marks.of(tokenizer, template.source if template else "")
        if marks is None:
            return None
        return ThoughtLimit(limit, marks, partial(_is_blank, tokenizer), prompt)

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        tokenizer = self._parts.tokenizer
        return tuple(token for token in range(tokenizer.vocab_size) if tokenizer.is_end(token))


def _is_blank(tokenizer: EngineTokenizer, token: int) -> bool:
    """Whether its text is nothing but spaces and new lines."""
    piece = tokenizer.piece(token, special=True)
    return bool(piece) and not piece.strip()
