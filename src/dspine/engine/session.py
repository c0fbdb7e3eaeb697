"""A conversation on an engine: its messages, and answers that become part of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspine.engine.engine import Engine
from dspine.engine.events import Event, Finish, Step
from dspine.engine.session_file import read_session, write_session
from dspine.errors import FileError, UsageError
from dspine.text.chat_template import Message, check_messages


class Session:
    """Messages of one conversation. The engine keeps what it has read, so a turn costs its new
    tokens only; several sessions may take turns on one engine, each starts from what they share.

        with dspine.load() as engine:
            session = dspine.Session(engine, system="Answer briefly.")
            for event in session.ask("Why is the sky blue?", max_tokens=100):
                if isinstance(event, dspine.Step):
                    print(event.text, end="", flush=True)
            for event in session.ask("And at sunset?"):
                ...

    Both iterators are those of `Engine.generate` (Prefill, Steps, Finish) and take its options.
    The question and the answer join `messages` when the answer is over, also when it was
    cancelled or the iterator was closed early, then with the text that was made until then. An
    answer that fails, or is given up before any text, leaves the messages as they were.

    To change history: `undo` removes the last question with its answer, `edit` replaces a
    message and removes all after it, `regenerate` answers the last question again, `reset`
    starts anew. Nothing of this decodes anything; the next answer finds out what it can reuse.
    `save` and `load` carry messages and memory over to another process.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        messages: Iterable[Message] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`messages` so far, with `system` before them; `variables` reach the chat template."""
        self._engine = engine
        self._variables = dict(variables or {})
        self._messages: list[Message] = [dict(message) for message in messages]
        if system is not None:
            self._messages.insert(0, {"role": "system", "content": system})
        self._answering = False

    @property
    def engine(self) -> Engine:
        """Who answers."""
        return self._engine

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, oldest first."""
        return tuple(self._messages)

    @property
    def waits_for_answer(self) -> bool:
        """Whether the last message is the user's (after `edit`): `regenerate` answers it."""
        return bool(self._messages) and self._messages[-1]["role"] == "user"

    def count_tokens(self) -> int:
        """Tokens that the conversation takes of the context, the next question not counted."""
        if not self._messages:
            return 0
        variables = {**self._variables, "add_generation_prompt": False}
        return len(self._engine.encode(self._messages, variables=variables))

    def ask(self, question: str | Message, **options: Any) -> Iterator[Event]:
        """Events of the answer to `question`: text, or a message as the chat template wants it.

        `options` are those of `Engine.generate`. What cannot be answered raises at once.
        """
        self._check_idle()
        if self.waits_for_answer:
            raise UsageError(
                "the last message is a question without an answer: call regenerate() to answer "
                "it, or undo() to remove it"
            )
        message: Message = (
            {"role": "user", "content": question} if isinstance(question, str) else dict(question)
        )
        return self._answer([*self._messages, message], options)

    def regenerate(self, **options: Any) -> Iterator[Event]:
        """Answer the last question again; the new answer replaces the old one."""
        self._check_idle()
        return self._answer(self._messages[: self._last_question() + 1], options)

    def edit(self, index: int, content: str) -> None:
        """Give message number `index` another content and remove all messages after it."""
        self._check_idle()
        if not 0 <= index < len(self._messages):
            raise UsageError(
                f"message {index} does not exist: the conversation has {len(self._messages)}, "
                f"numbered from 0"
            )
        self._messages[index:] = [{**self._messages[index], "content": content}]

    def undo(self) -> None:
        """Remove the last question and everything after it."""
        self._check_idle()
        del self._messages[self._last_question() :]

    def reset(self, *, system: str | None = None) -> None:
        """Remove all messages; a system message at the beginning stays, or becomes `system`."""
        self._check_idle()
        first = self._messages[:1]
        if system is not None:
            self._messages = [{"role": "system", "content": system}]
        else:
            self._messages = [m for m in first if m["role"] == "system"]

    def set_system(self, system: str | None) -> None:
        """Replace the system message at the beginning, or remove it; all others stay."""
        self._check_idle()
        rest = [m for i, m in enumerate(self._messages) if i or m["role"] != "system"]
        first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = [*first, *rest]

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write messages, and what the engine holds of them, to a file for `load`.

        What the engine holds is left out when it is mostly another conversation's. Raises
        FileError when the file exists (without `overwrite`) or cannot be written.
        """
        self._check_idle()
        wanted = None
        if self._messages:
            wanted = self._engine.encode(self._messages, variables=self._variables)
        memory = self._engine.save_memory(wanted)
        saved = replace(memory, messages=self.messages, variables=self._variables)
        write_session(Path(path).expanduser(), saved, overwrite=overwrite)

    @classmethod
    def load(cls, engine: Engine, path: str | Path) -> Session:
        """Go on with a saved conversation; nothing of it needs to be decoded again.

        Raises FileError for a file that is damaged, or was saved with another target or other
        settings; the engine goes on as it was then.
        """
        path = Path(path).expanduser()
        saved = read_session(path)
        if saved.messages:
            check_messages(saved.messages)
        try:
            engine.load_memory(saved)
        except FileError as error:
            raise FileError(f"{path}: {error}") from error
        return cls(engine, messages=saved.messages, variables=saved.variables)

    def _answer(self, messages: list[Message], options: dict[str, Any]) -> Iterator[Event]:
        variables = {**self._variables, **(options.pop("variables", None) or {})}
        events = self._engine.generate(messages, variables=variables, **options)
        return self._recorded(events, messages)

    def _recorded(self, events: Iterator[Event], messages: list[Message]) -> Iterator[Event]:
        self._check_idle()
        self._answering = True
        text: list[str] = []
        whole = False
        try:
            for event in events:
                if isinstance(event, Step):
                    text.append(event.text)
                whole = isinstance(event, Finish) and event.reason != "cancelled"
                yield event
        except GeneratorExit:
            self._record(messages, text, whole)
            raise
        else:
            self._record(messages, text, whole)
        finally:
            self._answering = False

    def _record(self, messages: list[Message], text: list[str], whole: bool) -> None:
        answer = "".join(text)
        if whole or answer:
            self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _last_question(self) -> int:
        for index in range(len(self._messages) - 1, -1, -1):
            if self._messages[index]["role"] == "user":
                return index
        raise UsageError("nothing was asked yet: there is no question to go back to")

    def _check_idle(self) -> None:
        if self._answering:
            raise UsageError(
                "an answer of this conversation is still running: read it to its end or close() it"
            )
