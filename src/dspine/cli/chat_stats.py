"""The numbers of `/stats`: the last answer, the conversation, and what it takes of the context."""

from __future__ import annotations

from collections.abc import Sequence

from dspine.engine.stats import ProposerStats, Stats


def add_up(answers: Sequence[Stats]) -> Stats:
    """Counts and times of several answers as if they were one."""
    shares: dict[str, ProposerStats] = {}
    for stats in answers:
        for name, share in stats.proposers.items():
            before = shares.get(name, ProposerStats())
            shares[name] = ProposerStats(
                before.steps + share.steps,
                before.drafted + share.drafted,
                before.accepted + share.accepted,
                before.emitted + share.emitted,
            )
    return Stats(
        prompt_tokens=sum(s.prompt_tokens for s in answers),
        prefill_ms=sum(s.prefill_ms for s in answers),
        tokens=sum(s.tokens for s in answers),
        steps=sum(s.steps for s in answers),
        drafted=sum(s.drafted for s in answers),
        accepted=sum(s.accepted for s in answers),
        draft_ms=sum(s.draft_ms for s in answers),
        verify_ms=sum(s.verify_ms for s in answers),
        host_ms=sum(s.host_ms for s in answers),
        wall_ms=sum(s.wall_ms for s in answers),
        proposers=shares,
        cached_tokens=sum(s.cached_tokens for s in answers),
    )


def stats_lines(title: str, stats: Stats) -> list[str]:
    """Tokens and speed, what came from memory, and what each proposer achieved."""
    new = stats.prompt_tokens - stats.cached_tokens
    speed = f"{stats.tokens} tokens in {stats.wall_ms / 1000:.2f} s"
    speed += f", {stats.tokens_per_second:.1f} tokens/s"
    reused = f"{stats.prompt_tokens} tokens, {stats.cached_tokens} of them from memory"
    lines = [
        f"{title}: {speed}, acceptance length {stats.acceptance_length:.2f}",
        f"  prompt: {reused}, {new} new at {stats.prompt_tokens_per_second:.0f} tokens/s",
    ]
    for name, share in sorted(stats.proposers.items()):
        if name == "none":
            lines.append(f"  without drafts: {share.steps} steps")
        else:
            lines.append(
                f"  {name}: acceptance length {share.acceptance_length:.2f} in {share.steps} "
                f"steps, {100 * share.acceptance_rate:.0f} % of {share.drafted} drafts accepted"
            )
    if stats.disabled_reason:
        lines.append(f"  drafting is off: {stats.disabled_reason}")
    return lines


def context_line(used: int, n_ctx: int) -> str:
    return f"context: {used} of {n_ctx} tokens used ({100 * used / n_ctx:.0f} %)"


def rollback_line(mode: str, reason: str) -> str:
    """How rejected drafts are taken back, and why so."""
    return f"rollback: {mode} ({reason})" if reason else f"rollback: {mode}"
