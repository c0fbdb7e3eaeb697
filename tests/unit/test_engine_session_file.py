"""Saved conversations: what comes back, what is refused, and that nothing else is lost."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dspine.drafters.base import ContextState
from dspine.engine.engine import Engine
from dspine.engine.events import Prefill, Step
from dspine.engine.session import Session
from dspine.engine.session_file import MAGIC, SavedSession, read_session, write_session
from dspine.engine.target import Snapshot
from dspine.errors import CapacityError, FileError, UsageError
from dspine.files.fingerprint import HEAD, file_fingerprint
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import VOCAB, make_engine
from tests.support.fake_target import FakeTarget, mixing, plain_answer

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
MADE_WITH = {
    "target": "t",
    "drafter": "d",
    "library": "1",
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "flash_attention": True,
}
NEXT = mixing(100, 3)


def make(n_ctx: int = 500, recurrent: bool = False, **made_with: object) -> Engine:
    target = FakeTarget(NEXT, VOCAB, n_ctx=n_ctx, recurrent=recurrent)
    drafter = FakeDrafter(lambda tokens, count: plain_answer(NEXT, tokens, count))
    return make_engine(
        target,
        drafter,
        template=TEMPLATE,
        is_recurrent=recurrent,
        made_with={**MADE_WITH, **made_with},
    )


def ask(session: Session, text: str) -> tuple[int, list[int]]:
    first, *rest = session.ask(text, max_tokens=9)
    assert isinstance(first, Prefill)
    return first.reused, [t for e in rest if isinstance(e, Step) for t in e.tokens]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    session = Session(make(), system="s", variables={"x": 1})
    ask(session, "one")
    session.save(tmp_path / "a.session")
    return tmp_path / "a.session"


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_loaded_conversation_goes_on_without_decoding_anew(
    tmp_path: Path, recurrent: bool
) -> None:
    first = Session(make(recurrent=recurrent), system="s", variables={"x": 1})
    ask(first, "one")
    first.save(tmp_path / "a.session")
    expected = ask(first, "two")
    engine = make(recurrent=recurrent)
    again = Session.load(engine, tmp_path / "a.session")
    assert again.messages[:2] == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
    )
    assert again._variables == {"x": 1}
    assert ask(again, "two") == expected
    assert expected[0] > 20
    assert again.messages == first.messages
    assert engine.disabled_reason is None


def test_the_drafters_context_comes_back(saved: Path) -> None:
    engine = make()
    Session.load(engine, saved)
    drafter = engine._parts.drafter
    assert isinstance(drafter, FakeDrafter)
    tokens = engine._held.tokens
    assert drafter.context == dict(enumerate(tokens))


def test_another_drafter_gets_its_features_anew(saved: Path) -> None:
    engine = make(drafter="other")
    session = Session.load(engine, saved)
    drafter = engine._parts.drafter
    assert isinstance(drafter, FakeDrafter) and drafter.context == {}
    reused, tokens = ask(session, "two")
    assert reused == 0  # it sees everything, so everything is decoded again
    assert drafter.drafts and len(tokens) == 9


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"target": "x"}, "another target: load"),
        ({"library": "2"}, r"library \(1 then, 2 now\)"),
        ({"cache_type_k": "q8_0"}, r"-ctk\) \(f16 then, q8_0 now\)"),
        ({"cache_type_v": "q8_0"}, "-ctv"),
        ({"flash_attention": False}, "-fa"),
    ],
)
def test_a_memory_of_other_settings_is_refused_and_the_running_one_stays(
    saved: Path, changed: dict[str, Any], text: str
) -> None:
    engine = make(**changed)
    running = Session(engine)
    ask(running, "mine")
    held, memory = engine._held.tokens, running.messages
    with pytest.raises(FileError, match=text) as caught:
        Session.load(engine, saved)
    assert str(saved) in str(caught.value)
    assert (engine._held.tokens, running.messages) == (held, memory)
    assert ask(running, "more")[0] == len(held)


def test_a_state_that_the_library_refuses_leaves_the_running_one(tmp_path: Path) -> None:
    engine = make()
    running = Session(engine)
    ask(running, "mine")
    held = engine._held.tokens
    for state, tokens in ((b"rubbish", (1, 2)), (b"[1, 2, 3]", (1, 2))):
        path = tmp_path / f"{len(state)}.session"
        write_session(path, SavedSession(made_with=MADE_WITH, tokens=tokens, state=state))
        with pytest.raises(FileError, match="does not fit this target"):
            Session.load(engine, path)
        assert engine._held.tokens == held
    assert ask(running, "more")[0] == len(held)


def test_a_session_that_is_too_long_or_of_another_vocabulary(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="the context has 10"):
        Session.load(make(n_ctx=10), saved)
    strange = SavedSession(made_with=MADE_WITH, tokens=(VOCAB,), state=b"[1]")
    write_session(tmp_path / "b", strange)
    with pytest.raises(FileError, match="tokens that this target does not know"):
        Session.load(make(), tmp_path / "b")


def test_every_damage_is_noticed(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    damaged = tmp_path / "damaged"
    for cut in (0, 5, 19, 20, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:cut])
        with pytest.raises(FileError, match=r"not a saved session|damaged or cut short"):
            read_session(damaged)
    for at in range(20, len(data), 37):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(FileError, match="damaged"):
            read_session(damaged)
    damaged.write_bytes(data + b"x")
    with pytest.raises(FileError, match="damaged"):
        read_session(damaged)


def sealed(header: Any, body: bytes = b"", version: int = 1) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<8sIQ", MAGIC, version, len(text)) + text + body
    return data + hashlib.blake2b(data, digest_size=32).digest()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GGUF" + bytes(100), "not a saved session"),
        (sealed({}, version=9), "of format 9"),
        (sealed(b"no json"), "does not understand"),
        (sealed([]), "does not understand"),
        (sealed({"sections": [1, 2, 3]}), "does not understand"),
        (sealed({"sections": [0, -1, 1]}), "does not understand"),
        (
            sealed(
                {
                    "sections": [3, 0, 0],
                    "messages": [],
                    "variables": {},
                    "made_with": {},
                    "checkpoints": [],
                },
                b"xxx",
            ),
            "does not understand",
        ),
        (sealed({"sections": [0, 0, 0], "messages": ["x"]}), "does not understand"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FileError, match=text):
        read_session(tmp_path / "x")


def test_a_missing_file_a_folder_and_messages_without_a_role(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        read_session(tmp_path / "none")
    with pytest.raises(FileError, match="cannot read"):
        read_session(tmp_path)
    write_session(tmp_path / "y", SavedSession(messages=({"content": "x"},), made_with=MADE_WITH))
    with pytest.raises(UsageError, match="role"):
        Session.load(make(), tmp_path / "y")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    saved = SavedSession(
        messages=({"role": "user", "content": "grüß"},),
        variables={"deep": [1, {"a": None}]},
        made_with={"target": "t"},
        tokens=(1, 2, 70000),
        state=bytes(range(256)),
        checkpoints=(Snapshot(1, b"a"), Snapshot(2, b"bc")),
        drafter=ContextState(1, 3, b"rows"),
    )
    write_session(tmp_path / "s", saved)
    assert read_session(tmp_path / "s") == saved
    with pytest.raises(FileError, match="exists already"):
        write_session(tmp_path / "s", SavedSession())
    assert read_session(tmp_path / "s") == saved
    write_session(tmp_path / "s", SavedSession(), overwrite=True)
    assert read_session(tmp_path / "s") == SavedSession()
    with pytest.raises(UsageError, match="plain JSON"):
        write_session(tmp_path / "t", SavedSession(variables={"x": object()}))
    assert not (tmp_path / "t").exists()


def test_another_conversations_memory_is_not_saved(tmp_path: Path) -> None:
    engine = make()
    mine, other = Session(engine, system="mine"), Session(engine, system="other")
    ask(mine, "one")
    ask(other, "two")
    mine.save(tmp_path / "mine")
    assert read_session(tmp_path / "mine").tokens == ()
    again = Session.load(engine, tmp_path / "mine")
    assert again.messages == mine.messages
    other.save(tmp_path / "other")
    assert len(read_session(tmp_path / "other").tokens) == engine.held.tokens > 10


def test_a_session_without_messages_keeps_the_memory(tmp_path: Path) -> None:
    engine = make()
    list(engine.generate([1, 2, 3], max_tokens=5))
    Session(engine).save(tmp_path / "s")
    fresh = make()
    Session.load(fresh, tmp_path / "s")
    assert fresh._held.tokens == engine._held.tokens


def test_nothing_is_saved_while_an_answer_runs(tmp_path: Path, saved: Path) -> None:
    engine = make()
    session = Session(engine)
    events = session.ask("x", max_tokens=5)
    next(events)
    with pytest.raises(UsageError, match="still running"):
        session.save(tmp_path / "n")
    with pytest.raises(UsageError, match="still running"):
        Session.load(engine, saved)
    events.close()  # type: ignore[attr-defined]
    session.save(tmp_path / "n")


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    data = bytearray(3 * HEAD)
    file = tmp_path / "model"

    def of() -> str:
        file.write_bytes(data)
        return file_fingerprint(file)

    seen = {of()}
    data[100] = 1
    seen.add(of())
    data[-1] = 1
    seen.add(of())
    data += b"\0"
    seen.add(of())
    assert len(seen) == 4
    (tmp_path / "small").write_bytes(b"x")
    assert file_fingerprint(tmp_path / "small") == file_fingerprint(tmp_path / "small")
    with pytest.raises(FileError, match=r"does not exist|cannot read"):
        file_fingerprint(tmp_path / "none")
