"""Colours an answer by who wrote each token: the drafter, the n-gram proposer or the target.

python examples/inspect_events.py "List the months of the year." -n 60
"""

from __future__ import annotations

import argparse

import dspine
from dspine.text.detokenise import Detokeniser

COLOURS = {"dspine": "\033[32m", "ngram": "\033[33m"}
TARGET, RESET = "\033[0m", "\033[0m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompt", nargs="?", default="List the months of the year, then again.")
    parser.add_argument("-n", type=int, default=60, help="tokens at most")
    parser.add_argument("-m", help="target GGUF; without it the default pair answers")
    parser.add_argument("-md", help="drafter GGUF made for that target")
    parser.add_argument("--proposer", default="auto", choices=["auto", "dspine", "ngram", "none"])
    chosen = parser.parse_args()

    rejected = 0
    print(f"{COLOURS['dspine']}drafter{RESET} {COLOURS['ngram']}n-gram{RESET} target\n")
    with dspine.load(chosen.m, chosen.md, proposer=chosen.proposer) as engine:
        text = Detokeniser(engine.tokenizer.piece)
        for event in engine.generate(chosen.prompt, max_tokens=chosen.n):
            if isinstance(event, dspine.Step):
                drafted_by = COLOURS.get(event.proposer, TARGET)
                rejected += event.drafted - event.accepted
                for index, token in enumerate(event.tokens):
                    colour = drafted_by if index < event.accepted else TARGET
                    print(f"{colour}{text.push(token)}{RESET}", end="", flush=True)
            elif isinstance(event, dspine.Finish):
                print(text.flush())
                show(event.stats.proposers, rejected)


def show(proposers: dict[str, dspine.ProposerStats], rejected: int) -> None:
    for name, share in sorted(proposers.items()):
        who = "plain steps" if name == "none" else name
        print(f"{who}: {share.steps} verifies, {share.acceptance_length:.2f} tokens each")
    print(f"{rejected} drafts were rejected and left no trace in the text")


if __name__ == "__main__":
    main()
