"""`python -m data regenerate server=…`: answers of a server, whatever it does. The server stands in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data import answer_server
from data.answer_server import Server
from data.prepare import encoded_chats
from data.readers import ReadReport
from data.regenerate import RegenerateSettings, open_answerer, regenerate
from data.sources import Source
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import TargetSource

Rows = list[dict[str, Any]]


class Fake(ThreadingHTTPServer):
    """Answers with the last question in capitals. plan: what befalls the requests of a question, in turn: a status, or
    one of `broken`, `no choices`, `hang up`, `cut`, `blank`. wait: seconds before each answer."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: dict[str, list[Any]] = {}
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.models = ["tiny"]
        self.wait = 0.0
        self.running = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with server.lock:
            server.asked.append(body)
            server.keys.add(self.headers["Authorization"])
            plan = server.plan.get(question, [])
            todo = plan.pop(0) if plan else 200
            server.running += 1
            server.most = max(server.most, server.running)
        time.sleep(server.wait)
        with server.lock:
            server.running -= 1
        if todo == "hang up":
            self.connection.close()
        elif todo == "broken":
            self.reply(200, None)
        elif todo == "no choices":
            self.reply(200, {"choices": []})
        elif todo in (200, "cut", "blank"):
            text = {"cut": question.upper()[:2], "blank": " \n"}.get(todo, question.upper())
            message = {"role": "assistant", "content": text, "reasoning_content": None}
            asked = sum(len(message["content"]) for message in body["messages"])
            usage = {"completion_tokens": len(text), "total_tokens": asked + len(text)}
            choice = {"index": 0, "message": message, "finish_reason": "length" if todo == "cut" else "stop"}
            self.reply(200, {"choices": [choice], "usage": usage})
        else:
            self.reply(todo, {"error": {"message": f"no,\nsaid {todo}"}})

    def reply(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode() if content is not None else b'{"choices": [{"mess'
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(answer_server, "FIRST_WAIT", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    fake = Fake()
    thread = threading.Thread(target=fake.serve_forever, daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()
    thread.join()


def chat(*questions: str, system: str = "") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    for question in questions:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "somebody else's"}]
    return {"messages": messages}


@pytest.fixture
def run(server: Fake, tmp_path: Path) -> Callable[..., tuple[Rows, ReadReport]]:
    """run(chats, **changes of the settings) -> (the lines of the output, the report)."""

    def go(chats: Rows, **changes: Any) -> tuple[Rows, ReadReport]:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in chats))
        values: dict[str, Any] = {
            "target": TargetSource(path="nowhere"), "dataset": Source("jsonl", path=str(path)),
            "output": tmp_path / "own.jsonl", "limit": None, "turns": None, "max_length": 60, "max_new_tokens": 20,
            "slots": 4, "temperature": 0.5, "top_k": 0, "top_p": 0.9, "seed": 3, "server": server.url,
        }  # fmt: skip
        settings, report = RegenerateSettings(**values | changes), ReadReport()
        regenerate(*open_answerer(settings), settings, report)
        return [json.loads(line) for line in settings.output.read_text().splitlines()], report

    return go


def contents(line: dict[str, Any]) -> list[str]:
    return [message["content"] for message in line["messages"]]


def test_every_turn_is_answered_on_own_earlier_answers(run: Any, server: Fake) -> None:
    written, report = run([chat("a", "b", "c", system="s"), chat("d"), {"prompt": "e"}])
    assert [contents(line) for line in written] == [["s", "a", "A", "b", "B", "c", "C"], ["d", "D"], ["e", "E"]]
    assert [(line["row"], line["finished"]) for line in written] == [(0, True), (1, True), (2, True)]
    assert (report.kept, report.dropped) == (3, {})
    third = next(body for body in server.asked if body["messages"][-1]["content"] == "c")
    assert [message["content"] for message in third["messages"]] == ["s", "a", "A", "b", "B", "c"]
    assert {key: third[key] for key in ("model", "temperature", "top_p", "max_tokens", "seed")} == {
        "model": "tiny", "temperature": 0.5, "top_p": 0.9, "max_tokens": 20, "seed": 5,
    }  # fmt: skip
    assert "top_k" not in third
    assert server.keys == {None}
    assert len({body["seed"] for body in server.asked}) == 5


def test_key_and_top_k_are_sent(run: Any, server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run([chat("a")], top_k=7)
    assert server.keys == {"Bearer secret"}
    assert server.asked[0]["top_k"] == 7


def test_many_requests_at_once_and_no_more(run: Any, server: Fake) -> None:
    server.wait = 0.1
    chats = [chat(f"q{i}", f"r{i}") for i in range(12)]
    written, _ = run(chats, concurrency=5)
    assert [contents(line) for line in written] == [[f"q{i}", f"Q{i}", f"r{i}", f"R{i}"] for i in range(12)]
    assert server.most == 5


@pytest.mark.parametrize("trouble", [429, 500, 503, "broken", "no choices", "hang up"])
def test_trouble_that_passes_is_tried_again(run: Any, server: Fake, trouble: Any) -> None:
    server.plan = {"b": [trouble] * 3}
    written, report = run([chat("a"), chat("b"), chat("c")])
    assert [contents(line) for line in written] == [["a", "A"], ["b", "B"], ["c", "C"]]
    assert not report.dropped
    assert Counter(body["messages"][-1]["content"] for body in server.asked)["b"] == 4


@pytest.mark.parametrize(
    ("trouble", "name"),
    [(429, "HTTP 429"), (500, "HTTP 500"), ("broken", "broken reply"), ("hang up", "RemoteProtocolError")],
)
def test_trouble_that_stays_leaves_the_chat_for_the_next_run(run: Any, server: Fake, trouble: Any, name: str) -> None:
    chats = [chat("a"), chat("x", "b"), chat("c")]
    server.plan = {"b": [trouble] * answer_server.TRIES}
    written, report = run(chats)
    assert [line["row"] for line in written] == [0, 2]
    assert report.places == {f"no answer from the server ({name}), left for the next run": ["line 2"]}
    written, report = run(chats)
    assert [contents(line) for line in written] == [["a", "A"], ["x", "X", "b", "B"], ["c", "C"]]
    assert (report.kept, report.dropped) == (1, {})


def test_waits_double(run: Any, server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(answer_server.asyncio, "sleep", sleep)
    monkeypatch.setattr(answer_server, "FIRST_WAIT", 0.5)
    server.plan = {"a": [500] * 4}
    run([chat("a")])
    assert waits == [0.5, 1, 2, 4]


def test_what_the_server_refuses_or_leaves_blank_is_not_asked_again(run: Any, server: Fake) -> None:
    chats = [chat("a"), chat("b"), chat("c"), chat("d", "e"), chat("f", "g")]
    server.plan = {"b": [400], "c": ["blank"], "e": [400], "g": ["blank"]}
    written, report = run(chats)
    assert [(contents(line), line["finished"]) for line in written] == [
        (["a", "A"], True),
        (["d", "D"], True),
        (["f", "F"], True),
    ]
    assert report.places == {"refused by the server (HTTP 400)": ["line 2"], "answer without text": ["line 3"]}
    assert report.warnings == ["refused by the server (HTTP 400): no, said 400"]
    before = len(server.asked)
    again, report = run(chats)
    assert again == written
    assert (len(server.asked), report.kept, report.dropped) == (before, 0, {})


def test_a_cut_answer_is_marked_and_ends_the_chat(run: Any, server: Fake, tokenizer: Any, tmp_path: Path) -> None:
    server.plan = {"question": ["cut"]}
    written, _ = run([chat("a", "question", "c"), chat("d")])
    assert [(contents(line), line["finished"]) for line in written] == [
        (["a", "A", "question", "QU"], False),
        (["d", "D"], True),
    ]
    source = Source("jsonl", path=str(tmp_path / "own.jsonl"), strict=True)
    cut, whole = encoded_chats(tokenizer, source, ReadReport(), 200)
    assert str(tokenizer.decode(cut.ids)).endswith("QU")
    assert str(tokenizer.decode(whole.ids[whole.loss_mask])).startswith("D<|im_end|>")


def test_max_length_ends_a_chat_where_it_is_reached(run: Any, server: Fake) -> None:
    written, report = run([chat("a" * 10, "b", "c", "d")], max_length=24, max_new_tokens=20)
    assert contents(written[0]) == ["a" * 10, "A" * 10, "b", "B", "c", "C"]
    assert [body["max_tokens"] for body in server.asked] == [20, 4, 2]
    assert written[0]["finished"]
    assert not report.dropped


def test_reasoning_is_kept(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = answer_server.ServerAnswerer._read

    def thinking(self: Any, dialogue: Any, reply: Any) -> Any:
        reply["choices"][0]["message"]["reasoning_content"] = "hm"
        return read(self, dialogue, reply)

    monkeypatch.setattr(answer_server.ServerAnswerer, "_read", thinking)
    written, _ = run([chat("a")])
    assert written[0]["messages"][1] == {"role": "assistant", "content": "A", "reasoning_content": "hm"}


# --- servers that can't be used --------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_one_sentence(run: Any, server: Fake, tmp_path: Path) -> None:
    with pytest.raises(DraftwrightError, match=r"the server http://127.0.0.1:9 can't be reached .*: start it, or"):
        run([chat("a")], server="http://127.0.0.1:9")
    assert not (tmp_path / "own.jsonl").exists()


@pytest.mark.parametrize(
    ("models", "model", "sentence"),
    [
        (["x", "y"], None, "has the models x, y: pass model=NAME"),
        (["x", "y"], "z", "has the models x, y, not 'z': pass one of them as model=NAME"),
        ([], None, "lists no models: pass model=NAME"),
    ],
)
def test_the_model_must_be_known(run: Any, server: Fake, models: list[str], model: str | None, sentence: str) -> None:
    server.models = models
    with pytest.raises(DraftwrightError, match=sentence):
        run([chat("a")], model=model)


@pytest.mark.parametrize(
    ("status", "sentence"), [(401, "refuses the key"), (404, "has no such model or no chat completions")]
)
def test_denied_access_stops_at_once(run: Any, server: Fake, status: int, sentence: str) -> None:
    server.plan = {"a": [status]}
    with pytest.raises(DraftwrightError, match=rf"{sentence} \(HTTP {status}: no, said {status}\): correct .*OPENAI_A"):
        run([chat("a")])


def test_a_server_that_goes_away_ends_the_run(run: Any, server: Fake, tmp_path: Path) -> None:
    server.plan = {f"q{i}": [503] * answer_server.TRIES for i in range(5, 60)}
    with pytest.raises(DraftwrightError, match=r"left 16 chats in a row without an answer .*HTTP 503.* same command"):
        run([chat(f"q{i}") for i in range(60)], concurrency=1)
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) == 5


def test_no_answer_at_all_is_a_mistake(run: Any, server: Fake) -> None:
    server.plan = {"a": [400], "b": [400]}
    with pytest.raises(DraftwrightError, match=r"no chat of .* was answered \(2 × refused .* said 400"):
        run([chat("a"), chat("b")])


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/api/v1", "https://h/api/v1"),
        ("h:1", None),
        ("127.0.0.1:8000", None),
        ("ftp://h", None),
        ("http://h:x", None),
    ],
)
def test_addresses(url: str, base: str | None) -> None:
    given = Server(url, None, 1, 1.0)
    if base is not None:
        assert given.base == base
        return
    with pytest.raises(DraftwrightError, match=r"is no address: pass one like server=http://127.0.0.1:8000"):
        _ = given.base


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_killed_command_goes_on_without_loss_or_duplicates(run: Any, server: Fake, tmp_path: Path) -> None:
    chats = [chat(*(f"q{i} {turn}" for turn in range(1 + i % 3))) for i in range(60)]
    server.plan = {"q7 0": ["blank"]}
    whole, _ = run(chats, output=tmp_path / "whole.jsonl")
    command = [sys.executable, "-m", "data", "regenerate", f"server={server.url}", "dataset=jsonl", "concurrency=4"]
    command += [f"dataset.path={tmp_path / 'chats.jsonl'}", f"output={tmp_path / 'own.jsonl'}", "max_length=60"]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    server.wait = 0.05
    server.plan = {"q7 0": ["blank"]}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    output = tmp_path / "own.jsonl"
    while process.poll() is None and not (output.exists() and output.stat().st_size > 1500):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    found = output.read_bytes()
    kept = {json.loads(line)["row"] for line in found.splitlines(keepends=True) if line.endswith(b"\n")}
    assert 7 < len(kept) < 50
    output.write_bytes(found + b'{"row": 59, "finis')

    server.wait, server.asked = 0.0, []
    result = subprocess.run(command, capture_output=True, timeout=300, check=False, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{59 - len(kept)} conversations kept, 0 rows dropped" in result.stdout
    assert [json.loads(line) for line in output.read_text().splitlines()] == whole
    asked = {int(body["messages"][0]["content"].split()[0][1:]) for body in server.asked}
    assert asked == set(range(60)) - kept - {7}
