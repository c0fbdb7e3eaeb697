"""The options of `dspine bench`, `dspine eval` and `dspine compare`."""

from __future__ import annotations

from dspine.settings.setting import Setting, Variant

_BOTH = ("bench", "eval")
_REPORTING = ("bench", "eval", "compare")

MEASURING_SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="config",
        flags=("--config",),
        kind="list",
        default=(),
        in_environment=False,
        default_text="plain, ngram, dspine and auto",
        group="What",
        help="A configuration, may be given several times: plain, ngram, drafter or auto, then "
        "KEY=VALUE with m, md, draft, c, t, b, ngl, fa, ctk, ctv, rollback, match, kernels or "
        "name, as in dspine,draft=3,ctk=q8_0; draft=1/3/7 makes one of each.",
        commands=_BOTH,
        variants={
            "eval": Variant(
                "As for bench; eval measures acceptance, so its default is the drafter alone "
                "with all slots of its block.",
                "the drafter, all slots",
            )
        },
        placeholder="TEXT",
    ),
    Setting(
        name="tasks",
        flags=("--tasks",),
        kind="text",
        default=None,
        in_environment=False,
        default_text="mix",
        group="What",
        help="Task sets, separated by commas: mix (ten prompts of our own), gsm8k, math500, "
        "humaneval, mbpp, mt-bench, languages (German, French, Spanish, Chinese).",
        commands=_BOTH,
        variants={
            "eval": Variant(
                "Task sets, separated by commas: gsm8k, math500, humaneval, mbpp, mt-bench, mix, "
                "languages.",
                "the five public ones",
            )
        },
        placeholder="NAMES",
    ),
    Setting(
        name="repeats",
        flags=("-r", "--repeats"),
        kind="int",
        default=3,
        least=1,
        in_environment=False,
        group="What",
        help="How often each prompt is answered.",
        commands=_BOTH,
        variants={"eval": Variant("How often each prompt is answered.", "1", default=1)},
        placeholder="N",
    ),
    Setting(
        name="temps",
        flags=("--temps",),
        kind="text",
        default="0,1",
        in_environment=False,
        group="What",
        help="Temperatures, separated by commas; the other samplers have llama.cpp's defaults.",
        commands=_BOTH,
        variants={"eval": Variant("Temperatures, separated by commas.", "0", default="0")},
        placeholder="LIST",
    ),
    Setting(
        name="depth",
        flags=("--depth",),
        kind="text",
        default="0",
        in_environment=False,
        group="What",
        help="Tokens of other text before the prompt, separated by commas, as in 0,4096.",
        commands=_BOTH,
        placeholder="LIST",
    ),
    Setting(
        name="concurrency",
        flags=("--concurrency",),
        kind="text",
        default="1",
        in_environment=False,
        group="What",
        help="Answers made at once, separated by commas, as in 1,2,4; each has the context of -c.",
        commands=("bench",),
        placeholder="LIST",
    ),
    Setting(
        name="one_at_a_time",
        flags=("--one-at-a-time",),
        kind="switch",
        default=False,
        group="Running",
        help="Load one configuration at a time, for models of which several do not fit into "
        "memory; they alternate by repeats then, not by prompts.",
        commands=_BOTH,
    ),
    Setting(
        name="anew",
        flags=("--anew",),
        kind="switch",
        default=False,
        in_environment=False,
        group="Running",
        help="Throw away what a broken-off run of the same plan has measured.",
        commands=_BOTH,
    ),
    Setting(
        name="csv",
        flags=("--csv",),
        kind="switch",
        default=False,
        in_environment=False,
        group="Output",
        help="Print the summary as CSV.",
        commands=_BOTH,
    ),
    Setting(
        name="md",
        flags=("--md",),
        kind="switch",
        default=False,
        in_environment=False,
        group="Output",
        help="Print the tables as Markdown.",
        commands=_REPORTING,
    ),
    Setting(
        name="plot",
        flags=("--plot",),
        kind="path",
        default=None,
        in_environment=False,
        group="Output",
        help="Draw speed by task, acceptance by slot, speed against depth and against answers at "
        "once (PNG or SVG).",
        commands=_BOTH,
        placeholder="FILE",
    ),
    Setting(
        name="report",
        flags=("--report",),
        kind="path",
        default=None,
        in_environment=False,
        group="Output",
        help="Write a page that needs nothing else, report.html, and result.json beside it.",
        commands=_BOTH,
        placeholder="FOLDER",
    ),
)
