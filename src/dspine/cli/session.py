"""From the settings of a command line to an open engine and a request for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

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
class Request:
    """What one `dspine run` asks for."""

    prompt: Prompt
    text: str
    """What the user said, without a system message."""
    raw: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    grammar: GrammarOptions | None
    logprobs: int | None
    sampling: SamplingOptions


def read_request(options: Options, argument: str | None, standard_input: TextIO) -> Request:
    """Prompt and limits; UsageError for what does not go together."""
    count, raw, system = options.number("predict"), options.switch("raw"), options.text("system")
    if count == 0:
        raise UsageError("-n is 0: ask for at least 1 token, or -1 for no limit")
    if raw and system is not None:
        raise UsageError("--raw and --system exclude each other: raw text has no system message")
    logprobs = options.number("logprobs")
    if logprobs >= 0 and (options.switch("compare") or not options.switch("json")):
        raise UsageError("--logprobs is printed by --json without --compare only: change the two")
    file = options.path("session")
    for other in ("raw", "compare"):
        if file is not None and options.switch(other):
            raise UsageError(f"--session and --{other} exclude each other")
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"the folder of --session {file} does not exist: create it first")
    text = read_prompt(argument, options.text("prompt"), options.path("file"), standard_input)
    user = {"role": "user", "content": text}
    return Request(
        prompt=text if system is None else [{"role": "system", "content": system}, user],
        text=text,
        raw=raw,
        max_tokens=None if count < 0 else count,
        stop=options.texts("stop"),
        grammar=read_grammar(options),
        logprobs=None if logprobs < 0 else logprobs,
        sampling=read_sampling(options),
    )


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


def open_session(engine: Engine, file: Path, system: str | None) -> Session:
    """The conversation in `file`, or a new one that begins with `system`."""
    from dspine.engine.session import Session

    if not file.exists():
        return Session(engine, system=system)
    if system is not None:
        raise UsageError(
            f"--system belongs to the beginning of a conversation, and {file} holds one that has "
            f"begun: leave it out, or name another file"
        )
    return Session.load(engine, file)


def open_engine(options: Options) -> Engine:
    """Load the pair that the options name; nothing of the drafter is loaded for --plain."""
    from dspine.engine.load import load

    logging.basicConfig(format="dspine: %(message)s", level=logging.WARNING)
    template, flash = options.path("chat_template"), options.choice("flash_attn")
    return load(
        options.path("model"),
        options.path("model_draft"),
        proposer="none" if options.switch("plain") else options.choice("proposer"),
        n_ctx=options.positive("ctx_size"),
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
