"""The whole way from a target to a drafter of its own, in miniature: minutes, not a useful drafter.

python examples/train_tiny.py runs/tiny --steps 60

The commands `dspine train answers`, `train features`, `train fit` and `convert` do it at full size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import dspine
from dspine.default_pair import default_target
from dspine.files.convert import convert_checkpoint
from dspine.train.answers import AnswerOptions, generate_answers
from dspine.train.features import FeatureOptions, capture
from dspine.train.options import FitOptions, Geometry
from dspine.train.trainer import fit

QUESTIONS = ("Name three colours.", "Count to ten.", "Say hello in French.", "What is 2 + 2?")
GEOMETRY = Geometry(num_layers=1, block_size=4, transfer_rank=32, message_size=32, window=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("-n", type=int, default=64, help="tokens of each answer at most")
    parser.add_argument("-t", type=int, help="threads")
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    target, folder, threads = default_target(), chosen.folder, chosen.t
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    shards, run, drafter = folder / "shards", folder / "run", folder / "drafter.gguf"

    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"q{i}", "prompt": text}) for i, text in enumerate(QUESTIONS)]
    prompts.write_text("\n".join(lines) + "\n")
    limits = {"max_tokens": chosen.n, "threads": threads}
    generate_answers(AnswerOptions(target, (prompts,), answers, greedy_share=1.0, **limits))
    capture(FeatureOptions(target, (answers,), shards, num_taps=3, threads=threads))
    result = fit(
        FitOptions(
            target,
            shards=(shards,),
            output=run,
            steps=chosen.steps,
            geometry=GEOMETRY,
            draft_vocab_size=1024,
            anchors_per_step=32,
            threads=threads,
        )
    )
    convert_checkpoint(result.checkpoint, drafter, target=target, overwrite=True)

    # So small a drafter does not pay; naming a number of drafts makes it draft all the same.
    with dspine.load(target, drafter, proposer="dspine", spec_draft_n_max=3) as engine:
        answer = engine.complete(QUESTIONS[0], max_tokens=chosen.n)
    print(answer.text)
    print(f"{answer.stats.accepted} of {answer.stats.drafted} drafts accepted")


if __name__ == "__main__":
    main()
