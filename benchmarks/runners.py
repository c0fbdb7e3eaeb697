"""Programs that answer the same prompts in turn, and what each of them did."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO

import common

import dspine
from dspine.engine.engine import Engine
from dspine.engine.stats import Stats

LOOKUP_TOKENS = 10
"""Drafts of llama-cpp-python's prompt lookup: its own default."""
SERVER_CONTEXT = 2048
_START_SECONDS = 120


@dataclass(slots=True)
class Tally:
    """What one configuration did on one task (or on all)."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    host_ms: float = 0.0
    proposers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 4))
    differing: int = 0

    def add(self, stats: Stats) -> None:
        """Count one answer."""
        self.tokens += stats.tokens
        self.seconds += stats.wall_ms / 1000
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.draft_ms += stats.draft_ms
        self.verify_ms += stats.verify_ms
        self.host_ms += stats.host_ms
        for name, share in stats.proposers.items():
            kept = self.proposers[name]
            for i, value in enumerate((share.steps, share.drafted, share.accepted, share.emitted)):
                kept[i] += value

    def add_foreign(self, tokens: int, seconds: float) -> None:
        """Count an answer of a program that reports nothing but time."""
        self.tokens += tokens
        self.steps += tokens
        self.seconds += seconds

    def add_server(self, timings: dict[str, Any]) -> None:
        """Count an answer by llama-server's own timings; its first token comes with the prompt."""
        tokens, accepted = max(0, timings["predicted_n"] - 1), timings.get("draft_n_accepted", 0)
        self.tokens += tokens
        # A verify emits its accepted drafts and one token more.
        self.steps += tokens - accepted
        self.seconds += timings["predicted_ms"] / 1000
        self.drafted += timings.get("draft_n", 0)
        self.accepted += accepted

    def to_json(self) -> dict[str, Any]:
        """Totals and the figures derived from them."""
        steps = max(1, self.steps)
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 2) if self.seconds else 0.0,
            "acceptance_length": round(self.tokens / steps, 4),
            "acceptance_rate": round(self.accepted / self.drafted, 4) if self.drafted else 0.0,
            "draft_ms": round(self.draft_ms / steps, 3),
            "verify_ms": round(self.verify_ms / steps, 3),
            "host_ms": round(self.host_ms / steps, 3),
            "proposers": {
                name: dict(zip(("steps", "drafted", "accepted", "emitted"), counts, strict=True))
                for name, counts in self.proposers.items()
            },
            "answers_unlike_plain": self.differing,
        }


Runner = Callable[[list[int], int, Tally], tuple[int, ...]]


def measure(
    runners: dict[str, Runner],
    tokenise: Engine,
    count: int | None,
    predict: int,
    foreign: Sequence[str],
) -> dict[str, dict[str, Tally]]:
    """Every prompt by every runner in turn; tallies by runner and task, and "all".

    Answers are compared with those of the runner "plain", but for those named in `foreign`,
    whose kernels round otherwise.
    """
    tallies: dict[str, dict[str, Tally]] = {name: defaultdict(Tally) for name in runners}
    work = common.prompts(count=count)
    for name, runner in runners.items():  # warm-up: buffers, threads, page cache
        runner(tokenise.encode("Say hello."), 16, Tally())
        print(f"ready: {name}", file=sys.stderr)
    for number, (task, _, prompt) in enumerate(work):
        tokens = tokenise.encode(prompt)
        names = list(runners)
        answers = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answers[name] = runners[name](tokens, predict, tallies[name][task])
        for name in names:
            if name not in foreign and answers[name] != answers["plain"]:
                tallies[name][task].differing += 1
        print(f"{number + 1} of {len(work)} prompts", file=sys.stderr)
    for tasks in tallies.values():
        tasks["all"] = total([tasks[task] for task in common.TASKS])
    return tallies


def fixed_drafts(
    target: Path, drafter: Path | None, drafts: int, arguments: argparse.Namespace
) -> list[Stats]:
    """What answering the prompts with so many drafts in every step took, prompt by prompt."""
    with dspine.load(
        target,
        drafter,
        proposer="dspine",
        spec_draft_n_max=drafts,
        n_threads=arguments.threads,
        flash_attention=True,
        calibrate=False,
    ) as engine:
        return [
            engine.complete(prompt, max_tokens=arguments.predict).stats
            for _, _, prompt in common.prompts(count=arguments.count)
        ]


def acceptance_of(answers: Sequence[Stats]) -> tuple[float, float]:
    """Tokens per verify, and the share of drafts that are kept."""
    steps = sum(stats.steps for stats in answers)
    tokens = sum(stats.tokens for stats in answers)
    drafted = sum(stats.drafted for stats in answers)
    accepted = sum(stats.accepted for stats in answers)
    return round(tokens / steps, 4), round(accepted / drafted, 4)


def engine_runner(engine: Engine, *, plain: bool) -> Runner:
    """An engine of ours."""

    def run(tokens: list[int], predict: int, tally: Tally) -> tuple[int, ...]:
        result = engine.complete(tokens, max_tokens=predict, plain=plain)
        tally.add(result.stats)
        return result.tokens

    return run


def llama_cpp_python(
    model: str, stack: ExitStack, *, lookup: bool = False, threads: int | None = None
) -> Runner:
    """`llama_cpp.Llama` in a process of its own, which no kernels of dspine can reach.

    Its defaults (of threads too, unless told), or with its prompt-lookup decoding.
    """
    options = json.dumps({"lookup": lookup, "threads": threads})
    worker = stack.enter_context(
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), model, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(worker.terminate)
    requests, replies = worker.stdin, worker.stdout
    assert requests is not None and replies is not None

    def run(tokens: list[int], predict: int, tally: Tally) -> tuple[int, ...]:
        print(json.dumps({"tokens": tokens, "predict": predict}), file=requests, flush=True)
        reply = json.loads(replies.readline())
        tally.add_foreign(max(0, len(reply["tokens"]) - 1), reply["seconds"])
        return tuple(reply["tokens"])

    return run


def _work(model: str, lookup: bool, threads: int | None) -> None:
    """The worker: `llama_cpp.Llama` with its defaults, but for a context that holds the prompts."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None
    llama = Llama(
        model,
        n_ctx=SERVER_CONTEXT,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        draft_model=draft,
    )
    end = llama.token_eos()
    for line in sys.stdin:
        request = json.loads(line)
        answer: list[int] = []
        started = last = perf_counter()
        for token in llama.generate(request["tokens"], temp=0.0, reset=True):
            last = perf_counter()
            if not answer:
                started = last  # the first token comes with the prompt
            answer.append(token)
            if token == end or len(answer) == request["predict"]:
                break
        print(json.dumps({"tokens": answer, "seconds": last - started}), flush=True)


def llama_server(binary: str, arguments: Sequence[str], stack: ExitStack) -> Runner:
    """A llama-server of its own, one slot, asked through its HTTP interface with token ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    server = stack.enter_context(
        subprocess.Popen(
            [
                *(binary, *arguments, "--host", "127.0.0.1", "--port", str(port)),
                *("-np", "1", "-c", str(SERVER_CONTEXT)),
            ],
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    )
    stack.callback(server.terminate)
    address = f"http://127.0.0.1:{port}"
    _wait(address, server, log)
    return server_runner(address)


def server_runner(address: str) -> Runner:
    """A llama-server that runs; speeds are those of its own `timings`."""

    def run(tokens: list[int], predict: int, tally: Tally) -> tuple[int, ...]:
        body = {
            "prompt": tokens,
            "n_predict": predict,
            "temperature": 0,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            answer = json.load(reply)
        timings = answer["timings"]
        tally.add_server(timings)
        return tuple(answer["tokens"])

    return run


def server_version(binary: str) -> str:
    """What llama-server says of itself."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return next(
        line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")
    )


def _wait(address: str, server: subprocess.Popen[bytes], log: BinaryIO) -> None:
    limit = time.monotonic() + _START_SECONDS
    while time.monotonic() < limit:
        if server.poll() is not None:
            log.seek(0)
            last = b" / ".join(log.read().splitlines()[-3:]).decode(errors="replace")
            raise SystemExit(f"llama-server ended with code {server.returncode}: {last}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    raise SystemExit(f"llama-server did not start within {_START_SECONDS} s")


def total(parts: list[Tally]) -> Tally:
    """All tasks together."""
    whole = Tally()
    for part in parts:
        for name in ("tokens", "seconds", "steps", "drafted", "accepted", "differing"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        for name in ("draft_ms", "verify_ms", "host_ms"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        for proposer, counts in part.proposers.items():
            kept = whole.proposers[proposer]
            for i, value in enumerate(counts):
                kept[i] += value
    return whole


if __name__ == "__main__":
    _work(sys.argv[1], **json.loads(sys.argv[2]))
