"""Options that say how the next token is drawn (`dspine run`, `chat`); names are llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping

from dspine.settings.setting import Kind, Setting, Value, Variant

_COMMANDS = ("run", "chat", "serve")
_TRAINING = ("train fit", "train prompts", "train answers", "train features")


def _setting(
    name: str,
    kind: Kind,
    default: Value,
    text: str,
    *,
    flags: tuple[str, ...] = (),
    default_text: str = "",
    least: float | None = None,
    choices: tuple[str, ...] = (),
    separator: str = "",
    training: Mapping[str, Variant] = {},
) -> Setting:
    return Setting(
        name=name,
        flags=flags or ("--" + name.replace("_", "-"),),
        kind=kind,
        default=default,
        group="Sampling",
        help=text,
        commands=(*_COMMANDS, *training),
        choices=choices,
        least=least,
        default_text=default_text,
        separator=separator,
        variants=training,
        placeholder="" if choices else {"int": "N", "float": "X"}.get(kind, "TEXT"),
    )


SAMPLING_SETTINGS: tuple[Setting, ...] = (
    _setting(
        "samplers",
        "text",
        "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature",
        "The steps of sampling in their order, separated by ; (a step that is not named is left "
        "out).",
    ),
    _setting(
        "temp",
        "float",
        0.0,
        "Temperature; 0 takes the most likely token.",
        flags=("--temp",),
        default_text="0: the most likely token",
        least=0.0,
    ),
    _setting(
        "top_k",
        "int",
        40,
        "Keep this many of the most likely tokens; 0 is all.",
        least=0,
        training={
            "train fit": Variant("Candidates of a slot.", default=16, least=1, group="Geometry")
        },
    ),
    _setting(
        "top_p",
        "float",
        0.95,
        "Keep the most likely tokens up to this probability; 1 is all.",
        least=0.0,
        training={
            name: Variant("Probability mass that they are drawn from.", group="Generation")
            for name in ("train prompts", "train answers")
        },
    ),
    _setting(
        "min_p",
        "float",
        0.05,
        "Keep tokens with at least this share of the best one's probability; 0 is all.",
    ),
    _setting(
        "typical",
        "float",
        1.0,
        "Keep the most typical tokens up to this probability; 1 is all.",
        flags=("--typical", "--typical-p"),
    ),
    _setting(
        "top_n_sigma",
        "float",
        -1.0,
        "Keep tokens whose logit is at most this many standard deviations below the best; 0 or "
        "less is all.",
        flags=("--top-nsigma", "--top-n-sigma"),
    ),
    _setting(
        "repeat_penalty",
        "float",
        1.0,
        "Make tokens less likely that the last ones contain; 1 is off.",
    ),
    _setting(
        "repeat_last_n",
        "int",
        64,
        "How many last tokens penalties look at; 0 is none, -1 the whole context.",
        least=-1,
    ),
    _setting(
        "presence_penalty",
        "float",
        0.0,
        "Subtracted from the logit of a token that occurred; 0 is off.",
    ),
    _setting(
        "frequency_penalty",
        "float",
        0.0,
        "The same for each time it occurred; 0 is off.",
    ),
    _setting(
        "dry_multiplier",
        "float",
        0.0,
        "DRY: strength against repeating whole sequences; 0 is off.",
        least=0.0,
    ),
    _setting("dry_base", "float", 1.75, "DRY: growth of the penalty with the length.", least=1.0),
    _setting("dry_allowed_length", "int", 2, "DRY: repeats up to this length are free.", least=1),
    _setting(
        "dry_penalty_last_n",
        "int",
        -1,
        "DRY: how many last tokens it looks at; -1 is the whole context.",
        least=-1,
    ),
    _setting(
        "dry_sequence_breaker",
        "list",
        (),
        "DRY: a repeat ends at this text; may be given several times and replaces the default; "
        "none alone means no such text.",
        default_text='newline : " *',
    ),
    _setting(
        "xtc_probability",
        "float",
        0.0,
        "XTC: how often the likeliest of several likely tokens are left out; 0 is off.",
    ),
    _setting(
        "xtc_threshold",
        "float",
        0.1,
        "XTC: from which probability a token is likely; above 0.5 is off.",
    ),
    _setting(
        "logit_bias",
        "list",
        (),
        "Add to the logit of a token: ID+1.5 or ID-1.5, and ID-inf to forbid it; with commas "
        "between several, and may be given several times.",
        separator=",",
        flags=("-l", "--logit-bias"),
    ),
    Setting(
        name="seed",
        flags=("-s", "--seed"),
        kind="int",
        default=-1,
        least=-1,
        default_text="a new one each time",
        group="Sampling",
        help="Seed of the random numbers: the same seed gives the same text; -1 is a new one.",
        commands=(*_COMMANDS, *_TRAINING),
        placeholder="N",
        variants={
            command: Variant(
                "Start of the random numbers.", "", default=42, least=0, group="Training"
            )
            for command in _TRAINING
        },
    ),
    _setting(
        "spec_verify",
        "choice",
        "auto",
        "How drafts are judged when tokens are drawn; every way keeps the target's distribution. "
        "match: against the target's own draw; rejection: by probabilities, which keeps more; "
        "auto: match with a seed, else rejection.",
        choices=("auto", "match", "rejection"),
    ),
)
