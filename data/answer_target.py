"""Answers of a target in this process: batched, chats of like length beside each other, a static key/value cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from data.chat import encode_prompt
from data.dialogue import Answer, Dialogue
from data.messages import UnusableRow
from spec_decode.errors import DraftwrightError
from spec_decode.generate import Request, generate
from spec_decode.sampling import Sampling
from spec_decode.target_hf import HFTarget

WINDOW = 16  # chats for each slot that are sorted by length together, so that neighbours in the cache are alike


class TargetAnswerer:
    """An `Answerer`. slots: chats answered at once; room: tokens of a whole chat.

    Raises DraftwrightError when `room` exceeds the target's positions.
    """

    def __init__(
        self,
        target: HFTarget,
        tokenizer: PreTrainedTokenizerBase,
        *,
        slots: int,
        room: int,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        if room > target.spec.max_positions:
            raise DraftwrightError(
                f"max_length={room} exceeds the {target.spec.max_positions} positions of target "
                f"'{target.spec.name}': use max_length={target.spec.max_positions} or less"
            )
        self._target, self._tokenizer = target, tokenizer
        self._slots, self._room, self._max_new_tokens = slots, room, max_new_tokens
        self._sampling, self._seed = sampling, seed

    def __call__(self, dialogues: Iterator[Dialogue]) -> Iterator[Answer]:
        running: dict[int, Dialogue] = {}
        waiting: deque[Request] = deque()
        refused: deque[Answer] = deque()

        def requests(asked: Iterator[Dialogue]) -> Iterator[Request]:
            for dialogue in asked:
                try:
                    yield self._request(dialogue)
                    running[dialogue.row.number] = dialogue
                except UnusableRow as reason:
                    refused.append(Answer(dialogue, refused=str(reason)))

        def take() -> Request | None:
            while not waiting and (window := list(islice(dialogues, WINDOW * self._slots))):
                waiting.extend(sorted(requests(iter(window)), key=lambda request: request.prompt.numel()))
            return waiting.popleft() if waiting else None

        for request in generate(
            self._target,
            take,
            slots=self._slots,
            room=self._room,
            max_new_tokens=self._max_new_tokens,
            sampling=self._sampling,
        ):
            dialogue = running.pop(request.key)
            yield Answer(dialogue, _text(self._tokenizer, request), request.finished, len(request.tokens))
            if dialogue.open:
                waiting.extendleft(requests(iter([dialogue])))
            while refused:
                yield refused.popleft()
        yield from refused

    def _request(self, dialogue: Dialogue) -> Request:
        """Raises UnusableRow for a question that leaves no room for an answer."""
        prompt = encode_prompt(self._tokenizer, dialogue.messages)
        if len(prompt) >= self._room:
            raise UnusableRow("prompt of max_length tokens or more")
        return Request(dialogue.row.number, torch.tensor(prompt), dialogue.seed(self._seed))


def _text(tokenizer: PreTrainedTokenizerBase, answer: Request) -> str:
    """What the target wrote, without its end of turn and without a last character that a limit cut; empty for blanks
    alone."""
    tokens = answer.tokens[:-1] if answer.finished else answer.tokens
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    text = text if answer.finished else text.rstrip("\ufffd")
    return text if text.strip() else ""
