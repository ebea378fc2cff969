"""Answers of any server with OpenAI's chat completions (vLLM, SGLang, llama.cpp, …): many requests at once.

A request that meets a broken connection, HTTP 429 or 5xx, or a broken reply is sent again after 0.5, 1, 2, … seconds;
a chat that gets no answer even so is left for another run. The server's own limit decides how long a prompt may be.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import httpx2

from conf.check import Between, Positive
from data.dialogue import Answer, Dialogue
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.sampling import Sampling

KEY_VARIABLE = "OPENAI_API_KEY"  # where other clients of such servers find the key, too
FIRST_WAIT = 0.5  # seconds before a request is sent again; doubled each time
TRIES = 7  # of each request: the last one half a minute after the first
GIVE_UP = 16  # chats in a row without an answer: the server is gone
_LATER = {408, 429}  # and 5xx: what another try may get
_DENIED = {401: "refuses the key", 403: "refuses the key", 404: "has no such model or no chat completions"}

logging.getLogger("httpx2").setLevel(logging.WARNING)  # not a line for each request


@dataclass(frozen=True)
class Server:
    """Where answers come from. url: like http://127.0.0.1:8000, or with a path what stands before /chat/completions.

    model: its name there; None if the server has one alone. timeout: seconds that one answer may take; concurrency:
    requests at the same time.
    """

    url: str
    model: str | None
    concurrency: Positive
    timeout: Annotated[float, Between(1)]

    @property
    def base(self) -> str:
        """The address that the endpoints lie below. Raises DraftwrightError if `url` is none."""
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            url = httpx2.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise DraftwrightError(f"server={self.url} is no address: pass one like server=http://127.0.0.1:8000")
        return str(url).rstrip("/") if url.path.strip("/") else f"{str(url).rstrip('/')}/v1"

    def headers(self) -> dict[str, str]:
        """With the key, if there is one."""
        key = os.environ.get(KEY_VARIABLE)
        return {"Authorization": f"Bearer {key}"} if key else {}


class ServerAnswerer:
    """An `Answerer`. room: tokens of a whole chat, behind which nothing more is asked.

    Raises DraftwrightError when the server can't be reached, denies access, or has not the model.
    """

    def __init__(self, server: Server, *, room: int, max_new_tokens: int, sampling: Sampling, seed: int) -> None:
        self._server, self._room, self._max_new_tokens = server, room, max_new_tokens
        self._sampling, self._seed = sampling, seed
        self._lengths: dict[int, int] = {}  # tokens of open dialogues, by row
        self.model = _model(server)

    def __call__(self, dialogues: Iterator[Dialogue]) -> Iterator[Answer]:
        with asyncio.Runner() as runner:
            answers = self._answers(dialogues)

            async def following() -> Answer | None:
                return await anext(answers, None)

            while (answer := runner.run(following())) is not None:
                yield answer

    async def _answers(self, dialogues: Iterator[Dialogue]) -> AsyncIterator[Answer]:
        server = self._server
        limits = httpx2.Limits(max_connections=server.concurrency)
        opened: deque[Dialogue] = deque()
        running: set[asyncio.Task[Answer]] = set()
        unanswered = 0
        async with httpx2.AsyncClient(headers=server.headers(), timeout=server.timeout, limits=limits) as client:
            while True:
                while len(running) < server.concurrency:
                    dialogue = opened.popleft() if opened else next(dialogues, None)
                    if dialogue is None:
                        break
                    running.add(asyncio.create_task(self._answer(client, dialogue)))
                if not running:
                    return
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    answer = task.result()
                    unanswered = unanswered + 1 if answer.retry else 0
                    yield answer
                    if answer.dialogue.open:
                        opened.append(answer.dialogue)
                if unanswered >= GIVE_UP:
                    raise DraftwrightError(
                        f"the server {server.url} left {unanswered} chats in a row without an answer "
                        f"({answer.refused}): see to it, then give the same command again"
                    )

    async def _answer(self, client: httpx2.AsyncClient, dialogue: Dialogue) -> Answer:
        room = self._room - self._lengths.pop(dialogue.row.number, 0)
        if room <= 0:
            return Answer(dialogue, refused="prompt of max_length tokens or more")
        body = {
            "model": self.model,
            "messages": [{"role": message.role, "content": message.content} for message in dialogue.messages],
            "max_tokens": min(self._max_new_tokens, room),
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "seed": dialogue.seed(self._seed),
        }
        if self._sampling.top_k:  # not OpenAI's own, but vLLM's, SGLang's and others'
            body["top_k"] = self._sampling.top_k
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                response = await client.post(f"{self._server.base}/chat/completions", json=body)
                if response.status_code == 200:
                    return self._read(dialogue, response.json())
            except httpx2.TransportError as error:
                problem = type(error).__name__
            except (ValueError, LookupError, TypeError):
                problem = "broken reply"
            else:
                if response.status_code not in _LATER and response.status_code < 500:
                    return self._refusal(dialogue, response)
                problem = f"HTTP {response.status_code}"
        return Answer(dialogue, refused=f"no answer from the server ({problem}), left for the next run", retry=True)

    def _read(self, dialogue: Dialogue, reply: Any) -> Answer:
        """Raises ValueError, LookupError or TypeError for what is no chat completion."""
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        message = choice["message"]
        text, reasoning = message["content"] or "", message.get("reasoning_content") or message.get("reasoning") or ""
        if not (isinstance(text, str) and isinstance(reasoning, str)):
            raise TypeError("an answer is text")
        finished, tokens = choice["finish_reason"] == "stop", int(usage.get("completion_tokens", 0))
        self._lengths[dialogue.row.number] = int(usage.get("total_tokens", 0))
        return Answer(dialogue, text if text.strip() else "", finished, tokens, reasoning)

    def _refusal(self, dialogue: Dialogue, response: httpx2.Response) -> Answer:
        """Raises DraftwrightError if every request would be refused."""
        if what := _DENIED.get(response.status_code):
            raise _denied(self._server, what, response)
        return Answer(dialogue, refused=f"refused by the server (HTTP {response.status_code})", detail=_said(response))


def _model(server: Server) -> str:
    """The name of the model to ask. Raises DraftwrightError if the server doesn't have it or can't be reached."""
    try:
        response = httpx2.get(f"{server.base}/models", headers=server.headers(), timeout=server.timeout)
        names = [entry["id"] for entry in response.json()["data"]] if response.status_code == 200 else []
    except httpx2.TransportError as error:
        raise DraftwrightError(
            f"the server {server.url} can't be reached ({first_line(error)}): start it, or correct server=…"
        ) from error
    except (ValueError, LookupError, TypeError):
        names = []
    if response.status_code in (401, 403):
        raise _denied(server, _DENIED[response.status_code], response)
    if server.model is not None and (not names or server.model in names):
        return server.model
    if server.model is None and len(names) == 1:
        return names[0]
    raise DraftwrightError(
        f"the server {server.url} "
        + (f"has the models {', '.join(names)}" if names else "lists no models")
        + (f", not '{server.model}': pass one of them as model=NAME" if server.model else ": pass model=NAME")
    )


def _denied(server: Server, what: str, response: httpx2.Response) -> DraftwrightError:
    return DraftwrightError(
        f"the server {server.url} {what} (HTTP {response.status_code}: {_said(response)}): correct server=…, model=… "
        f"or the key in the environment variable {KEY_VARIABLE}"
    )


def _said(response: httpx2.Response) -> str:
    """What a server says about a refusal, on one line."""
    try:
        error = response.json()
        error = error.get("error", error)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, AttributeError):
        text = response.text
    return " ".join(text.split())[:200] or "no reason given"
