"""A chat whose user turns a model answers, and what answers it: the target in this process, or a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data.messages import Message
from data.rows import Row


class Dialogue:
    """A chat on its way: `messages` stands so far, and ends with a question while it is open.

    The source's turns are taken up to the given number of user turns (None takes all), without their answers.
    """

    def __init__(self, row: Row, turns: int | None = None) -> None:
        self.row = row
        self.messages: list[Message] = []
        users = [index for index, message in enumerate(row.messages) if message.role == "user"]
        stop = len(row.messages) if turns is None or turns >= len(users) else users[turns]
        self._asked = deque(message for message in row.messages[:stop] if message.role != "assistant")
        self._ask()

    @property
    def open(self) -> bool:
        """Whether a question waits for its answer."""
        return bool(self.messages) and self.messages[-1].role == "user"

    def seed(self, base: int) -> int:
        """Different for every answer of a run."""
        return base + 1_000_003 * self.row.number + sum(message.role == "assistant" for message in self.messages)

    def answer(self, message: Message, *, finished: bool) -> None:
        """Take an answer, and ask the next question behind a finished one."""
        self.messages.append(message)
        if finished:
            self._ask()

    def close(self) -> None:
        """Drop what has no answer."""
        while self.messages and self.messages[-1].role != "assistant":
            self.messages.pop()

    def _ask(self) -> None:
        while self._asked and not self.open:
            self.messages.append(self._asked.popleft())
        if not self.open:
            self.close()


@dataclass(frozen=True)
class Answer:
    """What a dialogue's question was answered. finished: whether the model ended it, rather than a limit; tokens: of
    the answer. refused: why there is no answer, equal for equal causes; detail: more about it; retry: whether another
    run may get one."""

    dialogue: Dialogue
    text: str = ""
    finished: bool = True
    tokens: int = 0
    reasoning: str = ""
    refused: str = ""
    detail: str = ""
    retry: bool = False


# Answers the question of each dialogue, as they end. Who reads an answer gives it to its dialogue before reading the
# next one; the answerer goes on with a dialogue that is then open again.
Answerer = Callable[[Iterator[Dialogue]], Iterator[Answer]]
