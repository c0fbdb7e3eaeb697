"""Answers several prompts at once; each text is the one that its prompt would get alone.

python examples/several.py "Name three colours." "What is 17 + 25?" "Why is the sky blue?"
"""

from __future__ import annotations

import argparse

import dspine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompts", nargs="*", default=["Name three colours.", "What is 17 + 25?"])
    parser.add_argument("-n", type=int, default=40, help="tokens of an answer at most")
    parser.add_argument("-np", type=int, default=2, help="answers at once")
    parser.add_argument("-m", help="target GGUF; without it the default pair answers")
    parser.add_argument("-md", help="drafter GGUF made for that target")
    chosen = parser.parse_args()

    with dspine.load(chosen.m, chosen.md, parallel=chosen.np) as engine:
        scheduler = engine.scheduler()
        waiting = list(chosen.prompts)
        texts: dict[int, str] = {}
        while waiting or scheduler.free_slots() < scheduler.n_slots:
            while waiting and scheduler.free_slots():
                prompt = waiting.pop(0)
                texts[scheduler.start(prompt, max_tokens=chosen.n)] = f"> {prompt}\n"
            for number, event in scheduler.step():
                match event:
                    case dspine.Step():
                        texts[number] += event.text
                    case dspine.Finish(reason, stats):
                        print(texts[number])
                        print(f"[answer {number}: {stats.tokens} tokens, {reason}]")
                    case Exception():
                        print(f"[answer {number}: {event}]")
        scheduler.close()


if __name__ == "__main__":
    main()
