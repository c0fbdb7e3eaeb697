"""Answers prompts plainly and speculatively and shows speeds, acceptance and equality of the texts.

python examples/compare.py -n 128 "Count to twenty." "Write a haiku."
"""

from __future__ import annotations

import argparse

import dspine

PROMPTS = (
    "Write a Python function that reverses a list in place.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("-n", type=int, default=128, help="tokens of each answer at most")
    parser.add_argument("-m", help="target GGUF; without it the default pair answers")
    parser.add_argument("-md", help="drafter GGUF made for that target")
    chosen = parser.parse_args()

    print("   plain  specul.  ratio  length  text")
    with dspine.load(chosen.m, chosen.md) as engine:
        for prompt in chosen.prompts:
            both = engine.compare(prompt, max_tokens=chosen.n)
            plain, fast = both.plain.stats, both.speculative.stats
            print(
                f"{plain.tokens_per_second:>8.1f} {fast.tokens_per_second:>8.1f} "
                f"{both.ratio:>6.2f} {fast.acceptance_length:>7.2f}  {judge(both.divergence)}"
            )


def judge(divergence: dspine.Divergence | None) -> str:
    """What to make of the two texts."""
    if divergence is None:
        return "the same"
    if divergence.reproduced:
        return f"differs at token {divergence.position}: the target's own rounding"
    return f"differs at token {divergence.position}: an error, please report it"


if __name__ == "__main__":
    main()
