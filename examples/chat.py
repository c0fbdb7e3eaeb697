"""Asks several questions in one conversation, and shows how little of it is read again.

python examples/chat.py "Name three colours." "Which of them is the warmest?" -n 60
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dspine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("questions", nargs="*", default=["Name three colours.", "And three more?"])
    parser.add_argument("-n", type=int, default=60, help="tokens of an answer at most")
    parser.add_argument("--file", type=Path, help="keep the conversation here and go on with it")
    parser.add_argument("-m", help="target GGUF; without it the default pair answers")
    parser.add_argument("-md", help="drafter GGUF made for that target")
    chosen = parser.parse_args()

    with dspine.load(chosen.m, chosen.md) as engine:
        if chosen.file is not None and chosen.file.exists():
            session = dspine.Session.load(engine, chosen.file)
        else:
            session = dspine.Session(engine, system="Answer in one sentence.")
        for question in chosen.questions:
            print(f"> {question}")
            for event in session.ask(question, max_tokens=chosen.n):
                match event:
                    case dspine.Prefill():
                        print(f"[{event.reused} tokens from memory, {event.decoded} decoded]")
                    case dspine.Step():
                        print(event.text, end="", flush=True)
                    case dspine.Finish(_, stats):
                        print(f"\n[acceptance length {stats.acceptance_length:.2f}]")
        if chosen.file is not None:
            session.save(chosen.file, overwrite=True)


if __name__ == "__main__":
    main()
