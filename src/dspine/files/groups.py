"""Which part of a model a tensor belongs to, by its name in either naming, and what parts weigh."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The first that matches counts: a norm of the attention is a norm.
_GROUPS = (
    ("recurrent", r"ssm_|linear_attn|shortconv|time_mix|wkv"),
    ("embedding", r"token_embd|embed_tokens"),
    ("head", r"^output\.weight$|lm_head"),
    ("transfer codes", r"transfer_codes"),
    ("injection", r"inj_|injection"),
    ("selector", r"selector"),
    ("convolutions", r"_conv"),
    ("taps", r"^(model\.)?fc\."),
    ("draft vocabulary", r"^[dt]2[dt]$"),
    ("norms", r"norm"),
    ("experts", r"_exps|_shexp|expert|ffn_gate_inp"),
    ("attention", r"attn"),
    ("feed-forward", r"ffn|mlp"),
)
OTHER = "other"


def group_of(name: str) -> str:
    """The part that a tensor belongs to."""
    return next((group for group, pattern in _GROUPS if re.search(pattern, name)), OTHER)


def by_group(entries: Iterable[tuple[str, str, int, int]]) -> dict[str, dict[str, object]]:
    """Bytes, parameters and types of (name, type, parameters, bytes) entries, by part.

    Types are texts such as "Q4_K 10, F32 4", the most frequent first.
    """
    sums: dict[str, list[int]] = {}
    types: dict[str, dict[str, int]] = {}
    for name, kind, parameters, n_bytes in entries:
        group = group_of(name)
        total = sums.setdefault(group, [0, 0])
        total[0] += n_bytes
        total[1] += parameters
        counts = types.setdefault(group, {})
        counts[kind] = counts.get(kind, 0) + 1
    return {
        group: {
            "bytes": sums[group][0],
            "parameters": sums[group][1],
            "types": ", ".join(
                f"{kind} {count}"
                for kind, count in sorted(types[group].items(), key=lambda item: -item[1])
            ),
        }
        for group in sorted(sums, key=lambda group: -sums[group][0])
    }
