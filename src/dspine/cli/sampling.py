"""From the settings of a command line to the sampling of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dspine.errors import UsageError

if TYPE_CHECKING:
    from dspine.cli.options import Options
    from dspine.engine.sampling import SamplingOptions, Verification

NO_BREAKERS = ("none",)


def read_sampling(options: Options) -> SamplingOptions:
    """How tokens are drawn; UsageError for values that cannot be."""
    from dspine.engine.sampling import SamplingOptions
    from dspine.llama.sampler_options import DRY_BREAKERS, read_samplers

    seed, breakers = options.number("seed"), options.texts("dry_sequence_breaker")
    if breakers == NO_BREAKERS:
        breakers = ()
    elif not breakers:
        breakers = DRY_BREAKERS
    return SamplingOptions(
        samplers=read_samplers(options.text("samplers") or ""),
        temperature=options.real("temp"),
        top_k=options.number("top_k"),
        top_p=options.real("top_p"),
        min_p=options.real("min_p"),
        typical_p=options.real("typical"),
        top_n_sigma=options.real("top_n_sigma"),
        repeat_penalty=options.real("repeat_penalty"),
        repeat_last_n=options.number("repeat_last_n"),
        presence_penalty=options.real("presence_penalty"),
        frequency_penalty=options.real("frequency_penalty"),
        dry_multiplier=options.real("dry_multiplier"),
        dry_base=options.real("dry_base"),
        dry_allowed_length=options.number("dry_allowed_length"),
        dry_penalty_last_n=options.number("dry_penalty_last_n"),
        dry_sequence_breakers=breakers,
        xtc_probability=options.real("xtc_probability"),
        xtc_threshold=options.real("xtc_threshold"),
        logit_bias=tuple(read_bias(text) for text in options.texts("logit_bias")),
        seed=None if seed < 0 else seed,
        verification=cast("Verification", options.choice("spec_verify")),
    )


def read_bias(text: str) -> tuple[int, float]:
    """Token id and bias of a text such as 15043+1.5, 15043-1 or 15043-inf."""
    for sign in "+-":
        token, found, bias = text.partition(sign)
        if found and token.strip().isdecimal():
            try:
                return int(token), float(sign + bias)
            except ValueError:
                break
    raise UsageError(
        f"--logit-bias is {text!r}: give a token id, a sign and a number, as in 15043-1.5 or "
        f"15043-inf"
    )
