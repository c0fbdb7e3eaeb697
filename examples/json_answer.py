"""Asks for an answer that is JSON of a schema, reads it, and shows the least certain token.

python examples/json_answer.py "Make up a book." -n 200
"""

from __future__ import annotations

import argparse
import json
import math

import dspine

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "pages": {"type": "integer", "minimum": 1, "maximum": 2000},
        "genre": {"enum": ["novel", "poetry", "history", "science"]},
    },
    "required": ["title", "pages", "genre"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompt", nargs="?", default="Make up a book. Answer in JSON.")
    parser.add_argument("-n", type=int, default=200, help="tokens at most")
    parser.add_argument("-m", help="target GGUF; without it the default pair answers")
    parser.add_argument("-md", help="drafter GGUF made for that target")
    chosen = parser.parse_args()

    with dspine.load(chosen.m, chosen.md) as engine:
        grammar = dspine.GrammarOptions.json_schema(SCHEMA)
        result = engine.complete(chosen.prompt, grammar=grammar, max_tokens=chosen.n, logprobs=1)
        if result.reason == "length":
            print(f"cut after {chosen.n} tokens, so it is not whole: {result.text}")
            return
        book = json.loads(result.text)
        print(f"{book['title']!r}, {book['genre']}, {book['pages']} pages")
        least = min(result.logprobs or (), key=lambda noted: noted.logprob)
        text = engine.tokenizer.piece(least.token).decode(errors="replace")
        print(f"least certain: {text!r}, probability {math.exp(least.logprob):.3f}")


if __name__ == "__main__":
    main()
