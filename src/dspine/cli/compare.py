"""`dspine run --compare`: both ways of decoding one prompt, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dspine.cli import INTERRUPTED
from dspine.cli.output import print_json, warn

if TYPE_CHECKING:
    from dspine.engine.compare import Comparison, Divergence
    from dspine.engine.stats import Stats

UNEXPLAINED = 1


def print_comparison(comparison: Comparison, *, as_json: bool) -> int:
    """Texts, numbers and verdict; the exit code is 0 unless speculation changed the answer."""
    if as_json:
        print_json(comparison.to_json())
    else:
        print_texts(comparison)
        for line in table(comparison.plain.stats, comparison.speculative.stats):
            click.echo(line)
        click.echo(verdict(comparison))
    answers = (comparison.plain, comparison.speculative)
    if any(answer.reason == "cancelled" for answer in answers):
        return INTERRUPTED
    if comparison.divergence is not None and not comparison.divergence.reproduced:
        warn(
            f"the answers part at token {comparison.divergence.position} and the target alone "
            f"does not explain it: this is an error in dspine, please report it"
        )
        return UNEXPLAINED
    return 0


def print_texts(comparison: Comparison) -> None:
    plain, speculative = comparison.plain.text, comparison.speculative.text
    if plain == speculative:
        click.echo(f"--- plain and speculative\n{plain}\n---")
    else:
        click.echo(f"--- plain\n{plain}\n--- speculative\n{speculative}\n---")


def table(plain: Stats, speculative: Stats) -> list[str]:
    """The numbers of both, a row each."""
    rows: Sequence[tuple[str, str, str]] = (
        ("", "plain", "speculative"),
        ("tokens/s", f"{plain.tokens_per_second:.1f}", f"{speculative.tokens_per_second:.1f}"),
        ("tokens", str(plain.tokens), str(speculative.tokens)),
        ("verifies", str(plain.steps), str(speculative.steps)),
        (
            "acceptance length",
            f"{plain.acceptance_length:.2f}",
            f"{speculative.acceptance_length:.2f}",
        ),
        *(
            (
                f"  {name}, {share.steps} steps",
                "",
                f"{share.acceptance_length:.2f}",
            )
            for name, share in sorted(speculative.proposers.items())
        ),
        ("ms a step: draft", *per_step(plain.draft_ms, plain, speculative.draft_ms, speculative)),
        ("  verify", *per_step(plain.verify_ms, plain, speculative.verify_ms, speculative)),
        ("  host", *per_step(plain.host_ms, plain, speculative.host_ms, speculative)),
    )
    return [f"{name:<24}{left:>10}{right:>14}" for name, left, right in rows]


def per_step(left_ms: float, left: Stats, right_ms: float, right: Stats) -> tuple[str, str]:
    return f"{left_ms / max(1, left.steps):.2f}", f"{right_ms / max(1, right.steps):.2f}"


def verdict(comparison: Comparison) -> str:
    """The ratio, and whether the texts are the same."""
    speed = f"{comparison.ratio:.2f} times the plain speed"
    if comparison.speculative.stats.disabled_reason:
        speed += f" (drafting off: {comparison.speculative.stats.disabled_reason})"
    if comparison.divergence is None:
        return f"{speed}, the same text"
    return f"{speed}; {difference(comparison.divergence)}"


def difference(divergence: Divergence) -> str:
    told = f"the texts part at token {divergence.position}"
    if divergence.plain_gap is not None and divergence.speculative_gap is not None:
        told += (
            f", a near-tie in the target (logit gaps {divergence.plain_gap:.3f} and "
            f"{divergence.speculative_gap:.3f})"
        )
    if divergence.reproduced:
        told += "; the target alone gives the same in that batch shape"
    return told
