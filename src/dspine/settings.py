"""Every option once: its flags, type, default, environment name and help.

The command line, the generated flag table and later the server read this list; a flag wins
over its environment variable, which wins over the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from dspine.errors import UsageError

Kind = Literal["path", "int", "float", "text", "choice", "switch", "list"]
Value: TypeAlias = Path | int | float | str | bool | tuple[str, ...] | None

TRUE_WORDS = ("1", "on", "true", "yes", "enabled")
FALSE_WORDS = ("0", "off", "false", "no", "disabled", "")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
EVERY_LOADING_COMMAND = ("run", "doctor")


@dataclass(frozen=True, slots=True)
class Setting:
    """One option. `name` is its long flag with underscores, and the end of its variable."""

    name: str
    flags: tuple[str, ...]
    kind: Kind
    default: Value
    group: str
    help: str
    commands: tuple[str, ...]
    choices: tuple[str, ...] = ()
    least: float | None = None
    placeholder: str = ""
    default_text: str = ""
    """What the default means, where the bare value would not tell."""
    in_environment: bool = True
    """False for what belongs to one call alone, such as the prompt."""

    @property
    def env(self) -> str | None:
        return f"DSPINE_{self.name.upper()}" if self.in_environment else None

    @property
    def shown_default(self) -> str:
        if self.default_text:
            return self.default_text
        if self.kind == "switch":
            return "on" if self.default else "off"
        return "" if self.default in (None, ()) else str(self.default)

    def parse(self, text: str, origin: str) -> Value:
        """Turn `text` from `origin` (a flag or a variable, named in the error) into a value."""
        match self.kind:
            case "switch":
                return self._parse_switch(text, origin)
            case "choice":
                if text.lower() not in self.choices:
                    raise UsageError(f"{origin} is {text!r}: choose one of {_listed(self.choices)}")
                return text.lower()
            case "int" | "float":
                return self._parse_number(text, origin)
            case "path":
                if not text:
                    raise UsageError(f"{origin} is empty: give a file or folder")
                return Path(text).expanduser()
            case "list":
                return (text,)
            case "text":
                return text

    def _parse_switch(self, text: str, origin: str) -> bool:
        if text.lower() in TRUE_WORDS:
            return True
        if text.lower() in FALSE_WORDS:
            return False
        raise UsageError(f"{origin} is {text!r}: use on or off (also 1, 0, true, false)")

    def _parse_number(self, text: str, origin: str) -> int | float:
        wanted = "a whole number" if self.kind == "int" else "a number"
        try:
            number = int(text) if self.kind == "int" else float(text)
        except ValueError:
            raise UsageError(f"{origin} is {text!r}: it must be {wanted}") from None
        # `not >=` rather than `<`, so that nan is refused as well.
        if self.least is not None and not number >= self.least:
            raise UsageError(f"{origin} is {text}: it must be at least {self.least:g}")
        return number


def resolve(
    setting: Setting, given: str | None, flag: str, environment: Mapping[str, str]
) -> Value:
    """The value of `setting`: the flag's text, else its variable's, else the default."""
    if given is not None:
        return setting.parse(given, flag)
    if setting.env is not None and setting.env in environment:
        return setting.parse(environment[setting.env], f"the variable {setting.env}")
    return setting.default


def settings_of(command: str) -> tuple[Setting, ...]:
    """The settings of one command, in the order of its help."""
    return tuple(s for s in SETTINGS if command in s.commands)


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="model",
        flags=("-m", "--model"),
        kind="path",
        default=None,
        default_text="the default target",
        group="Model",
        help="Target: a GGUF file that llama.cpp runs.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="FILE",
    ),
    Setting(
        name="model_draft",
        flags=("-md", "--model-draft", "--spec-draft-model"),
        kind="path",
        default=None,
        default_text="the shipped drafter, with the default target",
        group="Model",
        help="Drafter: a DSpine GGUF made for that target.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="FILE",
    ),
    Setting(
        name="n_gpu_layers",
        flags=("-ngl", "--n-gpu-layers"),
        kind="int",
        default=0,
        least=-1,
        group="Model",
        help="Target layers kept on the graphics card; -1 is all of them.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="N",
    ),
    Setting(
        name="ctx_size",
        flags=("-c", "--ctx-size"),
        kind="int",
        default=0,
        least=0,
        default_text="the model's, at most 4096",
        group="Model",
        help="Context window in tokens: the prompt and the answer together; 0 is the default.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="N",
    ),
    Setting(
        name="cache_type_k",
        flags=("-ctk", "--cache-type-k"),
        kind="choice",
        default="f16",
        choices=CACHE_TYPES,
        group="Model",
        help="Number format of the cached keys.",
        commands=EVERY_LOADING_COMMAND,
    ),
    Setting(
        name="cache_type_v",
        flags=("-ctv", "--cache-type-v"),
        kind="choice",
        default="f16",
        choices=CACHE_TYPES,
        group="Model",
        help="Number format of the cached values; below f16 it needs flash attention.",
        commands=EVERY_LOADING_COMMAND,
    ),
    Setting(
        name="threads",
        flags=("-t", "--threads"),
        kind="int",
        default=0,
        least=0,
        default_text="one for each physical core",
        group="Speed",
        help="Processor threads; 0 is the default.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="N",
    ),
    Setting(
        name="batch_size",
        flags=("-b", "--batch-size"),
        kind="int",
        default=512,
        least=1,
        group="Speed",
        help="Prompt tokens that are processed at once.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="N",
    ),
    Setting(
        name="flash_attn",
        flags=("-fa", "--flash-attn"),
        kind="choice",
        default="auto",
        choices=("auto", "on", "off"),
        group="Speed",
        help="Flash attention; auto takes the setting that was measured to be faster.",
        commands=EVERY_LOADING_COMMAND,
    ),
    Setting(
        name="proposer",
        flags=("--proposer",),
        kind="choice",
        default="auto",
        choices=("auto", "dspine", "ngram", "none"),
        group="Speed",
        help="Where drafts come from: the drafter, repeated text in the context (ngram), or auto: "
        "ngram where a long match exists, else the drafter.",
        commands=("run",),
    ),
    Setting(
        name="spec_draft_n_max",
        flags=("--spec-draft-n-max",),
        kind="int",
        default=0,
        least=0,
        default_text="the width measured to be fastest",
        group="Speed",
        help="Tokens drafted for each step at most, which is the block width less one; "
        "0 is the default.",
        commands=("run",),
        placeholder="N",
    ),
    Setting(
        name="plain",
        flags=("--plain",),
        kind="switch",
        default=False,
        group="Speed",
        help="Decode without any drafts.",
        commands=("run",),
    ),
    Setting(
        name="prompt",
        flags=("-p", "--prompt"),
        kind="text",
        default=None,
        group="Prompt",
        help="The prompt, instead of the argument.",
        commands=("run",),
        in_environment=False,
        placeholder="TEXT",
    ),
    Setting(
        name="file",
        flags=("-f", "--file"),
        kind="path",
        default=None,
        group="Prompt",
        help="Read the prompt from a file; - is standard input, which is also read when no "
        "prompt is given.",
        commands=("run",),
        in_environment=False,
        placeholder="FILE",
    ),
    Setting(
        name="system",
        flags=("-sys", "--system"),
        kind="text",
        default=None,
        default_text="what the model's chat template says",
        group="Prompt",
        help="System message put before the prompt.",
        commands=("run",),
        placeholder="TEXT",
    ),
    Setting(
        name="chat_template",
        flags=("--chat-template",),
        kind="path",
        default=None,
        default_text="the model's own",
        group="Prompt",
        help="Jinja chat template to use instead of the model's.",
        commands=("run",),
        placeholder="FILE",
    ),
    Setting(
        name="raw",
        flags=("--raw", "--no-chat"),
        kind="switch",
        default=False,
        group="Prompt",
        help="Continue the prompt as it stands, without a chat template.",
        commands=("run",),
    ),
    Setting(
        name="predict",
        flags=("-n", "--predict"),
        kind="int",
        default=-1,
        least=-1,
        default_text="until the answer ends or the context is full",
        group="Output",
        help="Tokens to write at most; -1 is the default.",
        commands=("run",),
        placeholder="N",
    ),
    Setting(
        name="stop",
        flags=("--stop",),
        kind="list",
        default=(),
        group="Output",
        help="End the answer before this text; may be given several times.",
        commands=("run",),
        placeholder="TEXT",
    ),
    Setting(
        name="compare",
        flags=("--compare",),
        kind="switch",
        default=False,
        group="Output",
        help="Answer plainly and speculatively, and report both speeds and their ratio.",
        commands=("run",),
    ),
    Setting(
        name="json",
        flags=("--json",),
        kind="switch",
        default=False,
        group="Output",
        help="Print one JSON document instead of text.",
        commands=("run", "doctor", "inspect"),
    ),
    Setting(
        name="library",
        flags=("--library",),
        kind="path",
        default=None,
        default_text="the one of llama-cpp-python",
        group="Library",
        help="Folder with the llama.cpp libraries (libllama and libggml) of the same version.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="FOLDER",
    ),
    Setting(
        name="cache_dir",
        flags=("--cache-dir",),
        kind="path",
        default=None,
        default_text="dspine in $XDG_CACHE_HOME, else in ~/.cache",
        group="Library",
        help="Where measurements of this machine are kept.",
        commands=EVERY_LOADING_COMMAND,
        placeholder="FOLDER",
    ),
    Setting(
        name="no_probe",
        flags=("--no-probe",),
        kind="switch",
        default=False,
        group="Library",
        help="Do not test the library in a child process first.",
        commands=("run",),
    ),
)
