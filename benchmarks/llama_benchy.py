"""llama-benchy against `dspine serve` on the default pair, offline; its rates against ours.

It needs `pip install llama-benchy==0.4.0`. Its text comes from a small server on this machine, its
tokenizer from `dspine tokenizer export`. Run it on an idle machine:

    python benchmarks/llama_benchy.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import common

from dspine.bench.prompts import filler_text
from dspine.default_pair import choose_pair
from dspine.files.tokenizer_export import write_tokenizer

START_SECONDS = 120


class Quiet(SimpleHTTPRequestHandler):
    """Serves the book without a line for each request."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def main() -> None:
    """Run it and store its figures beside ours."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--pp", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--tg", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--depth", default="0,1024", help="tokens before the prompt")
    parser.add_argument("--concurrency", default="1,2", help="requests at a time")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    program = shutil.which("llama-benchy", path=str(Path(sys.executable).parent))
    if program is None:
        raise SystemExit("llama-benchy is not installed: run pip install llama-benchy==0.4.0")
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "book.txt").write_text(filler_text(), encoding="utf-8")
        write_tokenizer(model, folder / "tokenizer.json")
        book = serve_book(folder, stack)
        address, log = serve_pair(model, drafter, arguments.threads, folder, stack)
        result = folder / "result.json"
        subprocess.run(
            [
                *(program, "--base-url", f"{address}/v1", "--model", "local/default"),
                *("--tokenizer", str(folder / "tokenizer.json"), "--book-url", f"{book}/book.txt"),
                *("--pp", str(arguments.pp), "--tg", str(arguments.tg)),
                *("--depth", *arguments.depth.split(",")),
                *("--concurrency", *arguments.concurrency.split(",")),
                *("--runs", str(arguments.runs), "--skip-coherence", "--exact-tg"),
                *("--extra-body", "temperature=0", "--format", "json"),
                *("--save-result", str(result)),
            ],
            check=True,
        )
        table = json.loads(result.read_text(encoding="utf-8"))["benchmarks"]
        own = own_rates(log)
    document = {
        "llama_benchy": table,
        "own_tokens_per_second": own,
        "pair": [model.name, drafter.name if drafter else None],
        "summary": summary(table, own, arguments.tg, arguments.runs),
    }
    common.save("llama_benchy", document, arguments.output)
    print(json.dumps(document["summary"]))


def serve_book(folder: Path, stack: ExitStack) -> str:
    """A text for llama-benchy on the loopback interface; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}"


def serve_pair(
    model: Path, drafter: Path | None, threads: int | None, folder: Path, stack: ExitStack
) -> tuple[str, Path]:
    """`dspine serve` on a free port; its address and its log."""
    log = folder / "server.log"
    options = ["-m", str(model), "--port", "0", "-c", "4096", "--temp", "0", "--warmup"]
    options += ["-md", str(drafter)] if drafter else []
    options += ["-t", str(threads)] if threads else []
    with log.open("w", encoding="utf-8") as stream:
        server = subprocess.Popen([*common.PROGRAM, "serve", *options], stderr=stream)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    return common.wait_for_server(server, log, START_SECONDS), log


def own_rates(log: Path) -> list[tuple[int, float]]:
    """(tokens, tokens a second) of every answer, from the server's log."""
    text = log.read_text(encoding="utf-8")
    return [
        (int(tokens), float(rate))
        for tokens, rate in re.findall(r"(\d+) tokens at ([\d.]+)/s", text)
    ]


def summary(
    table: list[dict[str, Any]], own: list[tuple[int, float]], tg: int, runs: int
) -> dict[str, Any]:
    """Its first generation rate, of one request at a time, and ours of the same answers.

    Before the measured runs it asks once to warm up.
    """
    first = next((row["tg_throughput"]["mean"] for row in table if row.get("tg_throughput")), None)
    ours = [rate for tokens, rate in own if tokens == tg][1 : 1 + runs]
    if first is None or not ours:
        return {"rows": len(table)}
    mean = sum(ours) / len(ours)
    return {
        "rows": len(table),
        "llama_benchy_tg": round(first, 1),
        "own_tg": round(mean, 1),
        "ratio": round(first / mean, 3),
    }


if __name__ == "__main__":
    main()
