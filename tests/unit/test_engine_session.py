"""A conversation: what joins its messages and when, and what is decoded again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from dspine.engine.events import Event, Finish, Prefill, Step
from dspine.engine.session import Session
from dspine.errors import CapacityError, LibraryError, UsageError
from tests.support.fake_engine import EOS, VOCAB, make_engine
from tests.support.fake_target import FakeTarget

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{{ hint }}{% endif %}"
)


def echoes(tokens: Sequence[int]) -> int:
    """Answers with the last question in capital letters."""
    text = bytes(token for token in tokens if token < 256).decode()
    question, answer = text.rsplit("[a]", 1)
    wanted = question.rsplit("[u]", 1)[1].upper()
    return ord(wanted[len(answer)]) if len(answer) < len(wanted) else EOS


class Fragile(FakeTarget):
    broken = False

    def decode(self, tokens, position, logits):  # type: ignore[no-untyped-def]
        if self.broken:
            raise LibraryError("it failed")
        super().decode(tokens, position, logits)


def make_session(n_ctx: int = 200, **options: object) -> tuple[Session, Fragile]:
    target = Fragile(echoes, VOCAB, n_ctx=n_ctx)
    engine = make_engine(target, template=TEMPLATE)
    return Session(engine, **options), target  # type: ignore[arg-type]


def says(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Step))


def contents(session: Session) -> list[str]:
    return [f"{m['role'][0]}:{m['content']}" for m in session.messages]


def test_questions_and_answers_join_the_messages() -> None:
    session, _ = make_session(system="be loud")
    assert says(list(session.ask("one"))) == "ONE"
    events = list(session.ask({"role": "user", "content": "two"}))
    assert says(events) == "TWO"
    assert contents(session) == ["s:be loud", "u:one", "a:ONE", "u:two", "a:TWO"]
    assert isinstance(events[0], Prefill)
    # The end token and what the template puts after it are new, and the question.
    assert events[0].reused == len("~[s]be loud[u]one[a]ONE")
    assert session.count_tokens() == len("~[s]be loud[u]one[a]ONE[u]two[a]TWO")


def test_messages_may_be_given_and_are_not_shared() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "A"}]
    session, _ = make_session(messages=history, system="s")
    history[0]["content"] = "changed"
    assert says(list(session.ask("b"))) == "B"
    assert contents(session) == ["s:s", "u:a", "a:A", "u:b", "a:B"]


def test_variables_reach_the_template() -> None:
    session, target = make_session(variables={"hint": "h"})
    list(session.ask("hello", max_tokens=1))
    assert bytes(target.memory[1:]).endswith(b"[a]h")
    list(session.regenerate(max_tokens=1, variables={"hint": "he"}))
    assert bytes(target.memory[1:]).endswith(b"[a]he")


def test_an_answer_left_early_joins_with_its_text_so_far() -> None:
    session, _ = make_session()
    events = session.ask("wonderful")
    assert isinstance(next(events), Prefill)
    next(events)
    assert session.messages == ()
    with pytest.raises(UsageError, match="still running"):
        session.undo()
    with pytest.raises(UsageError, match="still running"):
        session.ask("b")
    events.close()  # type: ignore[attr-defined]
    assert contents(session) == ["u:wonderful", "a:W"]


def test_a_cancelled_answer_joins_if_it_has_text() -> None:
    session, _ = make_session()
    cancel = threading.Event()
    seen = []
    for event in session.ask("wonderful", cancel=cancel):
        seen.append(event)
        if len(seen) == 4:
            cancel.set()
    assert isinstance(seen[-1], Finish) and seen[-1].reason == "cancelled"
    assert contents(session) == ["u:wonderful", "a:WON"]
    list(session.ask("late", cancel=cancel))
    assert contents(session) == ["u:wonderful", "a:WON"]


def test_an_answer_that_is_empty_but_whole_joins() -> None:
    session, _ = make_session()
    assert says(list(session.ask("a", stop=["A"]))) == ""
    assert contents(session) == ["u:a", "a:"]


def test_a_failed_answer_leaves_the_messages_and_the_next_one_is_right() -> None:
    session, target = make_session()
    list(session.ask("one"))
    target.broken = True
    with pytest.raises(LibraryError):
        list(session.ask("two"))
    assert contents(session) == ["u:one", "a:ONE"]
    target.broken = False
    assert says(list(session.ask("three"))) == "THREE"


def test_an_iterator_that_is_never_read_changes_nothing() -> None:
    session, _ = make_session()
    session.ask("one")
    assert session.messages == ()
    assert says(list(session.ask("two"))) == "TWO"


def test_history_can_be_edited() -> None:
    session, target = make_session(system="s")
    for question in ("one", "two", "three"):
        list(session.ask(question))
    session.undo()
    assert contents(session) == ["s:s", "u:one", "a:ONE", "u:two", "a:TWO"]
    session.edit(3, "twenty")
    assert session.waits_for_answer
    with pytest.raises(UsageError, match="without an answer"):
        session.ask("more")
    target.decoded.clear()
    events = list(session.regenerate())
    assert says(events) == "TWENTY"
    assert isinstance(events[0], Prefill) and events[0].reused == len("~[s]s[u]one[a]ONE[u]tw")
    assert contents(session)[-2:] == ["u:twenty", "a:TWENTY"]
    session.edit(4, "no")
    assert says(list(session.ask("x"))) == "X"
    assert contents(session)[-3:] == ["a:no", "u:x", "a:X"]
    session.reset()
    assert contents(session) == ["s:s"]
    session.reset(system="t")
    assert contents(session) == ["s:t"]
    assert says(list(session.ask("again"))) == "AGAIN"


def test_the_system_message_can_be_exchanged_alone() -> None:
    session, _ = make_session()
    list(session.ask("one"))
    session.set_system("s")
    assert contents(session) == ["s:s", "u:one", "a:ONE"]
    session.set_system("t")
    assert contents(session) == ["s:t", "u:one", "a:ONE"]
    events = list(session.ask("two"))
    assert says(events) == "TWO"
    assert isinstance(events[0], Prefill) and events[0].reused == len("~[")
    session.set_system(None)
    assert contents(session) == ["u:one", "a:ONE", "u:two", "a:TWO"]


def test_what_cannot_be_edited_or_answered_is_told() -> None:
    session, _ = make_session(n_ctx=30)
    for action in (session.undo, session.regenerate):
        with pytest.raises(UsageError, match="nothing was asked"):
            action()
    with pytest.raises(UsageError, match="message 0 does not exist"):
        session.edit(0, "x")
    with pytest.raises(CapacityError, match="the context has 30"):
        session.ask("x" * 40)
    assert session.messages == () and session.count_tokens() == 0


def test_two_conversations_on_one_engine_do_not_mix() -> None:
    one, _ = make_session(system="shared")
    two = Session(one.engine, system="shared")
    for number in range(3):
        for session in (one, two):
            question = f"{number}{'a' if session is one else 'b'}"
            assert says(list(session.ask(question))) == question.upper()
    assert contents(one)[1::2] == ["u:0a", "u:1a", "u:2a"]
    assert contents(two)[1::2] == ["u:0b", "u:1b", "u:2b"]
