"""Prints an answer while it is made, then what speculation did for it.

python examples/stream_answer.py "Why is the sky blue?" -n 100
"""

from __future__ import annotations

import argparse

import dspine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("-n", type=int, default=100, help="tokens at most")
    parser.add_argument("-m", help="target GGUF; without it the default pair answers")
    parser.add_argument("-md", help="drafter GGUF made for that target")
    chosen = parser.parse_args()

    messages = [{"role": "user", "content": chosen.prompt}]
    with dspine.load(chosen.m, chosen.md) as engine:
        for event in engine.generate(messages, max_tokens=chosen.n):
            match event:
                case dspine.Prefill(tokens, ms):
                    print(f"[{tokens} prompt tokens in {ms:.0f} ms]")
                case dspine.Step():
                    print(event.text, end="", flush=True)
                case dspine.Finish(reason, stats):
                    print(f"\n[{reason}: {stats.tokens} tokens, {stats.steps} verifies, ", end="")
                    print(f"acceptance length {stats.acceptance_length:.2f}, ", end="")
                    print(f"{stats.tokens_per_second:.1f} tokens/s]")


if __name__ == "__main__":
    main()
