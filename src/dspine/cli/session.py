"""From the settings of a command line to an open engine and a request for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dspine.cli.models import named_pair
from dspine.cli.options import Options
from dspine.cli.prompt import read_prompt, read_text
from dspine.cli.sampling import read_sampling
from dspine.errors import UsageError

if TYPE_CHECKING:
    from dspine.engine.engine import Engine
    from dspine.engine.prompt import Prompt
    from dspine.engine.sampling import SamplingOptions
    from dspine.engine.session import Session
    from dspine.text.grammar import GrammarOptions

FLASH_ATTENTION = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What `run` and `chat` have in common of `Engine.generate`."""

    max_tokens: int | None
    stop: tuple[str, ...]
    grammar: GrammarOptions | None
    sampling: SamplingOptions
    variables: Mapping[str, Any]
    max_thoughts: int | None = None

    def arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Request:
    """What one `dspine run` asks for."""

    prompt: Prompt
    text: str
    """What the user said, without a system message."""
    raw: bool
    logprobs: int | None
    answer: AnswerOptions


def read_request(options: Options, argument: str | None, standard_input: TextIO) -> Request:
    """Prompt and limits; UsageError for what does not go together."""
    raw, system = options.switch("raw"), options.text("system")
    if raw and system is not None:
        raise UsageError("--raw and --system exclude each other: raw text has no system message")
    logprobs = options.number("logprobs")
    if logprobs >= 0 and (options.switch("compare") or not options.switch("json")):
        raise UsageError("--logprobs is printed by --json without --compare only: change the two")
    file = options.path("session")
    for other in ("raw", "compare"):
        if file is not None and options.switch(other):
            raise UsageError(f"--session and --{other} exclude each other: leave one of them out")
    check_session_file(file)
    text = read_prompt(argument, options.text("prompt"), options.path("file"), standard_input)
    user = {"role": "user", "content": text}
    return Request(
        prompt=text if system is None else [{"role": "system", "content": system}, user],
        text=text,
        raw=raw,
        logprobs=None if logprobs < 0 else logprobs,
        answer=read_answer(options),
    )


def read_answer(options: Options) -> AnswerOptions:
    """Limits, constraint and sampling; UsageError for what cannot be."""
    count = options.number("predict")
    if count == 0:
        raise UsageError("-n is 0: ask for at least 1 token, or -1 for no limit")
    return AnswerOptions(
        max_tokens=None if count < 0 else count,
        stop=options.texts("stop"),
        grammar=read_grammar(options),
        sampling=read_sampling(options),
        variables=read_variables(options.text("chat_template_kwargs")),
        max_thoughts=read_budget(options),
    )


def read_budget(options: Options) -> int | None:
    """Tokens of thoughts at most, None without a limit."""
    budget = options.number("reasoning_budget")
    return None if budget < 0 else budget


def read_variables(text: str | None) -> dict[str, Any]:
    """Variables of the chat template from a JSON object."""
    from dspine.text.chat_template import TEMPLATE_OWN

    try:
        found = {} if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"--chat-template-kwargs is not JSON: {error}; check its quotes and commas"
        ) from None
    if not isinstance(found, dict) or not TEMPLATE_OWN.isdisjoint(found):
        raise UsageError(
            f"--chat-template-kwargs is {text!r}: give a JSON object, without the names "
            f"{', '.join(sorted(TEMPLATE_OWN))}"
        )
    return found


def check_session_file(file: Path | None) -> None:
    """UsageError when a conversation could not be written there."""
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"the folder of --session {file} does not exist: create it first")


def read_grammar(options: Options) -> GrammarOptions | None:
    """The one constraint that was given; UsageError for several, or for what is no schema."""
    names = ("json_schema", "json_schema_file", "grammar", "grammar_file", "regex")
    given = [name for name in names if options.values[name] is not None]
    if not given:
        return None
    if len(given) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags} exclude each other: an answer follows one of them")
    from dspine.text.grammar import GrammarOptions

    name = given[0]
    if name.endswith("_file"):
        path = options.path(name)
        text = "" if path is None else read_text(path)
    else:
        text = options.choice(name)
    if name == "regex":
        return GrammarOptions.regex(text)
    if name.startswith("json"):
        return GrammarOptions.json_schema(text)
    return GrammarOptions.grammar(text)


def open_session(engine: Engine, file: Path | None, system: str | None) -> Session:
    """The conversation in `file`, or a new one that begins with `system`."""
    from dspine.engine.session import Session

    if file is None or not file.exists():
        return Session(engine, system=system)
    if system is not None:
        raise UsageError(
            f"--system belongs to the beginning of a conversation, and {file} holds one that has "
            f"begun: leave it out, or name another file"
        )
    return Session.load(engine, file)


def open_engine(options: Options, *, may_draft_later: bool = False, parallel: int = 1) -> Engine:
    """Load the pair that the options name; nothing of the drafter is loaded for --plain, unless
    `may_draft_later`. `parallel` requests can then be answered at once."""
    from dspine.engine.load import load

    logging.basicConfig(format="dspine: %(message)s", level=logging.WARNING)
    template, flash = options.path("chat_template"), options.choice("flash_attn")
    plain = options.switch("plain") and not may_draft_later
    model, drafter = named_pair(options, drafter=not plain)
    return load(
        model,
        drafter,
        proposer="none" if plain else options.choice("proposer"),
        n_ctx=options.positive("ctx_size"),
        parallel=parallel,
        n_threads=options.positive("threads"),
        n_batch=options.number("batch_size"),
        n_gpu_layers=options.number("n_gpu_layers"),
        spec_draft_n_max=options.positive("spec_draft_n_max"),
        rollback=options.choice("rollback"),
        flash_attention=FLASH_ATTENTION[flash],
        cache_type_k=options.choice("cache_type_k"),
        cache_type_v=options.choice("cache_type_v"),
        swa_full=options.switch("swa_full"),
        library=options.path("library"),
        cache_dir=options.path("cache_dir"),
        probe=not options.switch("no_probe"),
        calibrate=not options.switch("no_calibrate"),
        ngram_min_match=options.number("ngram_min_match"),
        ngram_table=options.path("ngram_table"),
        chat_template=None if template is None else read_text(template),
    )
