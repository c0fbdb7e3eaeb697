"""Many mixed requests at once against `dspine serve` on the default pair: nothing may go wrong.

Eight clients send answers of every kind, wrong bodies, prompts that are too long, and go away in
the middle (`soak_requests.py`). Greedy and seeded texts must be those of asking alone. In the end
every slot must be idle and the memory must not have grown.

    python benchmarks/soak.py --requests 2000
"""

from __future__ import annotations

import json
import re
import signal
import socket
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import common
from soak_requests import CHAT, Ask, Reply, asks, fault, references

from dspine.default_pair import choose_pair
from dspine.llama.library import find_library

START_SECONDS = 120.0
REPLY_SECONDS = 600.0
BODY_LIMIT = 1 << 20
QUEUE = 8
MOST_GROWTH = 0.02
JUDGED_FROM = 1000
"""Requests of a run whose memory is judged: shorter ones hardly leave the warm-up."""
PARTS = 10
"""The memory is read after each."""
WARM_UP = 3
"""Parts in which graphs of new shapes, threads and tables are still made."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running `dspine serve`."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    n_slots: int
    n_ctx: int
    """Positions of a slot."""

    def get(self, path: str) -> Any:
        """The document at a path, or its text."""
        with closing(_connect(self.address)) as connection:
            connection.request("GET", path)
            raw = connection.getresponse().read().decode()
        return raw if path == "/metrics" else json.loads(raw)

    def memory(self) -> dict[str, float]:
        """Resident and anonymous MiB of its process (Linux)."""
        found = common.memory_mib(self.process.pid)
        return {name: found[name] for name in ("VmRSS", "RssAnon")}


@contextmanager
def serving(arguments: Sequence[str], n_slots: int) -> Iterator[Server]:
    """`dspine serve` on a free port, with these options beside it; SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        options = (*("--port", "0", "--queue", str(QUEUE)), *("--body-limit", str(BODY_LIMIT)))
        with log.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [*common.PROGRAM, "serve", *options, *arguments], stderr=stream
            )
        try:
            address = common.wait_for_server(process, log, START_SECONDS)
            server = Server(process, address, log, n_slots, 0)
            n_ctx = server.get("/props")["default_generation_settings"]["n_ctx"]
            yield replace(server, n_ctx=n_ctx)
        finally:
            process.kill()
            process.wait()


def _connect(address: str) -> HTTPConnection:
    place = urlsplit(address)
    assert place.hostname is not None
    return HTTPConnection(place.hostname, place.port, timeout=REPLY_SECONDS)


def send(server: Server, ask: Ask) -> Reply:
    """One request, to the end of its reply or as far as its client stays."""
    started = time.perf_counter()
    with closing(_connect(server.address)) as connection:
        if ask.leave == "upload":
            connection.putrequest(ask.method, ask.path)
            connection.putheader("Content-Length", str(len(ask.body)))
            connection.endheaders(ask.body[: len(ask.body) // 2])
            return Reply(ask.status)
        headers = {"Content-Type": "application/json"}
        connection.request(ask.method, ask.path, ask.body or None, headers)
        if ask.leave == "soon":
            time.sleep(ask.after / 100)
            _hang_up(connection)
            return Reply(ask.status)
        with connection.getresponse() as response:
            return _read(connection, response, ask, started)


def _read(connection: HTTPConnection, response: HTTPResponse, ask: Ask, started: float) -> Reply:
    if not (response.getheader("Content-Type") or "").startswith("text/event-stream"):
        raw = response.read()
        seconds = time.perf_counter() - started
        is_json = (response.getheader("Content-Type") or "").startswith("application/json")
        documents = [json.loads(raw)] if is_json else []
        found = [one for one in documents if isinstance(one, dict)]
        return Reply(response.status, found, seconds=seconds, first_seconds=seconds)
    documents, is_done, first = [], False, 0.0
    while line := response.readline():
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            is_done = True
            break
        document = json.loads(line.removeprefix(b"data: "))
        documents.append(document)
        if not first and document.get("choices"):
            first = time.perf_counter() - started
        if ask.leave == "chunks" and len(documents) > ask.after:
            _hang_up(connection)
            break
    seconds = time.perf_counter() - started
    return Reply(response.status, documents, is_done, seconds, first or seconds)


def _hang_up(connection: HTTPConnection) -> None:
    """Leave at once and without a word, as a program that was killed."""
    if connection.sock is not None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    compared: int = 0
    first_seconds: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ask: Ask, reply: Reply | None, words: str | None) -> None:
        """One request and what was wrong with it."""
        with self.lock:
            self.kinds[ask.kind] += 1
            if words is not None:
                self.failures.append(f"{ask.kind} ({ask.key}): {words}")
            if reply is None:
                return
            if ask.leave is None:
                self.statuses[reply.status] += 1
            timings = reply.last("timings")
            if timings is not None:
                self.tokens += timings["predicted_n"]
                self.drafted += timings.get("draft_n", 0)
                self.accepted += timings.get("draft_n_accepted", 0)
                self.first_seconds.append(reply.first_seconds)


def run(
    server: Server, todo: Sequence[Ask], clients: int, alone: dict[str, str], tally: Tally
) -> None:
    """All of `todo` by that many clients at once; each takes the next one."""
    left = iter(todo)
    taking = threading.Lock()

    def client() -> None:
        while True:
            with taking:
                ask = next(left, None)
            if ask is None:
                return
            reply: Reply | None = None
            try:
                reply = send(server, ask)
                words = fault(ask, reply)
            except (OSError, HTTPException, ValueError) as error:
                words = f"{type(error).__name__}: {error}"
            if words is None and reply is not None and ask.key in alone and ask.leave is None:
                with tally.lock:
                    tally.compared += 1
                if reply.text != alone[ask.key]:
                    words = f"{reply.text!r} instead of {alone[ask.key]!r}, which it says alone"
            tally.add(ask, reply, words)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_idle(server: Server, looks: int = 400) -> str | None:
    """Wait until nothing is answered and nobody waits; what is still busy after so many looks."""
    busy: list[int] = []
    waiting: dict[str, float] = {}
    for _ in range(looks):
        slots = server.get("/slots")
        values = dict(
            re.findall(r"^(llamacpp:requests_\w+) (\S+)$", server.get("/metrics"), re.MULTILINE)
        )
        busy = [slot["id"] for slot in slots if slot["is_processing"]]
        waiting = {name: float(value) for name, value in values.items() if float(value)}
        if len(slots) != server.n_slots:
            return f"{len(slots)} slots instead of {server.n_slots}"
        if not busy and not waiting:
            return None
        time.sleep(0.05)
    return f"slots {busy} are busy, {waiting}"


def overflow(server: Server, tally: Tally) -> None:
    """More requests at once than slots and queue hold: some are refused with 503, none is lost."""
    body = {
        "messages": [{"role": "user", "content": "Count from 1 to 100."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    ask = Ask("overflow", CHAT, json.dumps(body).encode())
    replies: list[Reply] = []

    def client() -> None:
        replies.append(send(server, ask))

    count = server.n_slots + QUEUE + 8
    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = Counter(reply.status for reply in replies)
    tally.kinds["overflow"] += count
    tally.statuses.update(statuses)
    if set(statuses) != {200, 503} or sum(statuses.values()) != count:
        tally.failures.append(f"overflow: {dict(statuses)} of {count} requests")


def stop(server: Server) -> str | None:
    """SIGTERM; what is wrong with how it ended."""
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(30)
    except subprocess.TimeoutExpired:
        return "SIGTERM did not end the server within 30 s"
    log = server.log.read_text(encoding="utf-8")
    broken = [line for line in log.split("\n") if '"error"' in line or "Traceback" in line]
    if code != 0 or broken:
        return f"exit code {code}, log: {broken[:3]}"
    return None


def soak(
    server: Server, requests: int, clients: int, seed: int, *, compares: bool = True
) -> dict[str, Any]:
    """The whole run on a fresh server; what was found. `compares`: texts with those of asking
    alone, which are the same where a row does not depend on its batch.
    """
    tally, alone_tally = Tally(), Tally()
    alone: dict[str, str] = {}
    todo = list(asks(requests, seed, server.n_ctx, BODY_LIMIT))
    for ask in references(todo) if compares else ():
        reply = send(server, ask)
        alone_tally.add(ask, reply, fault(ask, reply))
        if ask.key is not None:
            alone[ask.key] = reply.text
    tally.failures += alone_tally.failures
    memory = []
    started = time.perf_counter()
    for part in range(PARTS):
        begin, end = (requests * number // PARTS for number in (part, part + 1))
        run(server, todo[begin:end], clients, alone, tally)
        leaked = wait_idle(server)
        if leaked is not None:
            tally.failures.append(f"after {end} requests: {leaked}")
            break
        memory.append(server.memory())
    seconds = time.perf_counter() - started
    overflow(server, tally)
    leaked = wait_idle(server)
    last = references(todo)[0]
    words = leaked or fault(last, send(server, last)) or stop(server)
    if words is not None:
        tally.failures.append(f"at the end: {words}")
    growth = memory[-1]["VmRSS"] / memory[min(WARM_UP, len(memory)) - 1]["VmRSS"] - 1
    return {
        "requests": requests,
        "clients": clients,
        "slots": server.n_slots,
        "n_ctx": server.n_ctx,
        "seconds": round(seconds, 1),
        "kinds": dict(sorted(tally.kinds.items())),
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "tokens": tally.tokens,
        "tokens_per_second": round(tally.tokens / seconds, 1),
        "drafted": tally.drafted,
        "accepted": tally.accepted,
        "texts_compared": tally.compared,
        "median_first_text_ms": round(1000 * statistics.median(tally.first_seconds), 1),
        "memory_mib": [{name: round(n, 1) for name, n in one.items()} for one in memory],
        "memory_growth": round(growth, 4) if requests >= JUDGED_FROM else None,
        "n_failures": len(tally.failures),
        "failures": tally.failures[:20],
    }


def main() -> int:
    """Run it and store what was found; exit code 1 when something went wrong."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("-np", "--parallel", type=int, default=4, help="slots of the server")
    parser.add_argument("-c", "--ctx-size", type=int, default=512, help="positions of a slot")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    options = [*("-m", str(model)), *(("-md", str(drafter)) if drafter else ())]
    options += ["-np", str(arguments.parallel), "-c", str(arguments.parallel * arguments.ctx_size)]
    options += ["-t", str(arguments.threads)] if arguments.threads else []
    kernels = find_library().kernels
    with serving(options, arguments.parallel) as server:
        found = soak(
            server,
            arguments.requests,
            arguments.clients,
            arguments.seed,
            compares=kernels.active,
        )
    passed = not found["failures"] and (found["memory_growth"] or 0.0) < MOST_GROWTH
    document = {
        "pair": [model.name, drafter.name if drafter else None],
        "kernels": kernels.text,
        "passed": passed,
        **found,
    }
    common.save("soak", document, arguments.output)
    print(json.dumps(document))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
