"""`python -m data regenerate`: the target's own answers, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data import answer_target
from data import regenerate as regenerate_module
from data.answer_file import AnswerFile, chat_row, read_rows
from data.chat import encode_chat, encode_prompt
from data.cli import main
from data.messages import Message
from data.prepare import encoded_chats, prepare
from data.readers import ReadReport
from data.regenerate import RegenerateSettings, open_answerer, regenerate
from data.sources import Source
from spec_decode.decode import plain_decode
from spec_decode.errors import DraftwrightError
from spec_decode.generate import Request
from spec_decode.target_hf import HFTarget, TargetSource, open_target

WORDS = ["<pad>", "<eos>", "<user>", "<bot>", *(f"w{i}" for i in range(28))]
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '<user> ', 'assistant': '<bot> ', 'system': ''}[m.role] }}{{ m.content }}"
    "{{ ' <eos> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
STOP = [1, 13, 20, 22, 24]  # <eos>, and words that this target writes now and then
POSITIONS = 96
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random target that ends turns with any of STOP."""
    folder = tmp_path_factory.mktemp("world")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, initializer_range=0.2, eos_token_id=STOP,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="module")
def opened(folder: Path) -> tuple[HFTarget, PreTrainedTokenizerBase]:
    """Target and tokenizer."""
    return open_target(TargetSource(path=str(folder / "target"), dtype="float64"))


def row(number: int, turns: int = 2, system: bool = False, **more: Any) -> dict[str, Any]:
    """A chat of `turns` questions whose answers are no words of the target's."""
    messages = [{"role": "system", "content": "w0 w1"}] if system else []
    for turn in range(turns):
        asked = " ".join(f"w{(3 * number + 5 * turn + i) % 28}" for i in range(1 + (number + turn) % 5))
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": "somebody else's"}]
    return {"messages": messages, **more}


CHATS = [
    row(i, turns=1 + i % 3, system=i % 4 == 0, **({"id": f"c{i // 2}_{i % 2}"} if i % 5 else {})) for i in range(24)
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Rows], Path]:
    def to_file(rows: Rows) -> Path:
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        return path

    return to_file


@pytest.fixture
def settings(folder: Path, tmp_path: Path, write: Callable[[Rows], Path]) -> RegenerateSettings:
    return RegenerateSettings(
        target=TargetSource(path=str(folder / "target"), dtype="float64"),
        dataset=Source("jsonl", path=str(write(CHATS))),
        output=tmp_path / "own.jsonl",
        limit=None, turns=None, max_length=60, max_new_tokens=9, slots=4, temperature=0.0, top_k=0, top_p=1.0, seed=0,
    )  # fmt: skip


@pytest.fixture
def run(opened: Any, settings: RegenerateSettings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """run(**changes of the settings) -> (the lines of the output, the report)."""
    monkeypatch.setattr(regenerate_module, "open_target", lambda _: opened)
    monkeypatch.setattr(regenerate_module, "pack_linears", lambda _: None)

    def go(**changes: Any) -> tuple[Rows, ReadReport]:
        report, now = ReadReport(), dataclasses.replace(settings, **changes)
        regenerate(*open_answerer(now), now, report)
        return lines(now.output), report

    return go


def lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(target: HFTarget, tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[str, bool]:
    """What plain decoding answers within 9 tokens and 60 in all, and whether it ends the turn."""
    prompt = encode_prompt(tokenizer, messages)
    tokens = plain_decode(target, prompt, max_new_tokens=min(9, 60 - len(prompt))).tokens
    stopped = tokens[-1] in STOP
    return str(tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True)), stopped


def texts(line: dict[str, Any]) -> list[str]:
    return [message["content"] for message in line["messages"]]


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 4, 30])
def test_answers_are_those_of_plain_decoding_on_own_earlier_answers(slots: int, run: Any, opened: Any) -> None:
    target, tokenizer = opened
    written, report = run(slots=slots)
    assert [line["row"] for line in written] == [row for row in range(len(CHATS)) if row != 9]
    assert (report.kept, report.dropped) == (len(CHATS) - 1, {"answer without text": 1})
    question = [Message("user", CHATS[9]["messages"][0]["content"])]
    assert said(target, tokenizer, question) == ("", True)
    ends = []
    for line in written:
        source = CHATS[line["row"]]
        given = [Message(**message) for message in line["messages"]]
        assert [m.content for m in given if m.role != "assistant"] == [
            message["content"] for message in source["messages"][: len(given)] if message["role"] != "assistant"
        ]
        for index, message in enumerate(given):
            if message.role != "assistant":
                continue
            text, stopped = said(target, tokenizer, given[:index])
            assert message.content == text
            assert stopped or index == len(given) - 1  # a cut answer ends the chat
        assert line["finished"] == stopped
        ends.append((line["finished"], len(given) == len(source["messages"])))
    assert set(ends) >= {(True, True), (False, True), (False, False)}


def test_answers_do_not_depend_on_what_is_answered_beside_them(run: Any, tmp_path: Path) -> None:
    sampled = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
    alone, _ = run(slots=1, **sampled)
    together, _ = run(slots=7, output=tmp_path / "together.jsonl", **sampled)
    assert alone == together
    greedy, _ = run(output=tmp_path / "greedy.jsonl")
    other_seed, _ = run(output=tmp_path / "seed.jsonl", seed=1, **sampled)
    assert len({json.dumps(each) for each in (alone, greedy, other_seed)}) == 3


def test_equal_chats_get_different_answers(run: Any, write: Any) -> None:
    """Every answer has dice of its own: by chat and by turn."""
    again = {"messages": row(0, turns=1)["messages"] * 2}
    write([again, again, again])
    written, _ = run(temperature=1.5)
    assert len({json.dumps(line["messages"]) for line in written}) == 3
    assert len({texts(line)[1] for line in written}) == 3


def test_limit_counts_chats_and_turns_cuts_them(run: Any, tmp_path: Path) -> None:
    everything, _ = run()
    first, report = run(limit=7, output=tmp_path / "limit.jsonl")
    assert first == everything[:7]
    assert report.kept == 7
    more, report = run(limit=9, output=tmp_path / "limit.jsonl")
    assert more == everything[:9]
    assert report.kept == 2
    single, _ = run(turns=1, output=tmp_path / "turns.jsonl")
    for line, whole in zip(single, everything, strict=True):
        assert [message["role"] for message in line["messages"]].count("user") == 1
        assert line["messages"] == whole["messages"][: len(line["messages"])]


def test_a_finished_file_is_left_alone(
    run: Any, settings: RegenerateSettings, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(limit=9)
    before = settings.output.read_bytes()
    monkeypatch.setattr(opened[0], "forward", lambda *_, **__: pytest.fail("the target ran"))
    _, report = run(limit=9)
    assert settings.output.read_bytes() == before
    assert report.kept == 0


def test_dropped_rows_are_counted_by_reason(run: Any, write: Any) -> None:
    long = {"messages": [{"role": "user", "content": "w1 " * 60}, {"role": "assistant", "content": "x"}]}
    write([row(0), {"messages": []}, long, {"text": "x"}, row(1), long, row(2)])
    written, report = run()
    assert report.dropped == {
        "prompt of max_length tokens or more": 2,
        "empty conversation": 1,
        "no known conversation field": 1,
    }
    assert report.kept == 3
    assert [line["row"] for line in written] == [0, 2, 4]  # places among the rows that hold a question


def test_questions_without_answers_are_answered(run: Any, write: Any) -> None:
    write([{"prompt": "w1 w2"}, {"turns": ["w3", "w4"]}, {"messages": [{"role": "user", "content": "w5"}]}])
    written, report = run()
    assert [[message["content"] for message in line["messages"][::2]] for line in written] == [
        ["w1 w2"],
        ["w3", "w4"],
        ["w5"],
    ]
    assert report.kept == 3


def test_a_later_question_that_does_not_fit_ends_the_chat_before_it(run: Any, write: Any) -> None:
    chat = row(0, turns=2)
    chat["messages"][2]["content"] = "w1 " * 60
    write([chat, row(1)])
    written, report = run(max_new_tokens=30, max_length=50)
    assert [message["role"] for message in written[0]["messages"]] == ["user", "assistant"]
    assert not report.dropped


def test_many_unusable_rows_in_a_row_do_not_end_the_run(run: Any, write: Any) -> None:
    long = {"messages": [{"role": "user", "content": "w1 " * 60}, {"role": "assistant", "content": "x"}]}
    write([long] * 40 + [row(0)] + [long] * 20 + [row(1)])
    written, report = run(slots=1)  # sorted in windows of 16
    assert [line["row"] for line in written] == [40, 61]
    assert report.dropped == {"prompt of max_length tokens or more": 60}


# --- what the target may answer --------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[list[int]]]], None]:
    """answers({row: tokens of each of its answers}); one that ends with a token of STOP is finished."""

    def script(tokens: dict[int, list[list[int]]]) -> None:
        def generate(_target: Any, take: Callable[[], Request | None], **_: Any) -> Iterator[Request]:
            while (request := take()) is not None:
                request.tokens = tokens[request.key].pop(0)
                request.finished = request.tokens[-1] in STOP
                yield request

        monkeypatch.setattr(answer_target, "generate", generate)

    return script


def test_an_answer_without_text_ends_the_chat_before_it(run: Any, write: Any, answers: Any) -> None:
    write([row(0, turns=1), row(1, turns=3), row(2, turns=2), row(3, turns=1)])
    answers({0: [[1]], 1: [[10, 11, 20], [13]], 2: [[12, 1], [0, 0, 0]], 3: [[15]]})
    written, report = run()
    assert [(line["row"], line["finished"], texts(line)[1:]) for line in written] == [
        (1, True, ["w6 w7"]),
        (2, True, ["w8"]),
        (3, False, ["w11"]),
    ]
    assert report.dropped == {"answer without text": 1}
    assert report.kept == 3


def test_a_character_that_the_limit_cut_is_left_out(
    run: Any, opened: Any, monkeypatch: Any, write: Any, answers: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """On bytes as tokens: the last of three bytes of € is missing."""
    write([row(0, turns=1), row(1, turns=1)])
    euro = tokenizer("a€", add_special_tokens=False)["input_ids"]
    broken = tokenizer("\ufffd", add_special_tokens=False)["input_ids"]
    answers({0: [euro[:-1]], 1: [[*broken, 1]]})
    monkeypatch.setattr(regenerate_module, "open_target", lambda _: (opened[0], tokenizer))
    assert [texts(line)[1] for line in run()[0]] == ["a", "\ufffd"]


# --- training on it --------------------------------------------------------------------------------------------------


def test_no_end_of_turn_is_supervised_where_an_answer_was_cut(run: Any, settings: Any, opened: Any) -> None:
    _, tokenizer = opened
    written, _ = run()
    chats = list(encoded_chats(tokenizer, Source("jsonl", path=str(settings.output)), ReadReport(), 200))
    assert len(chats) == len(written)
    for line, chat in zip(written, chats, strict=True):
        supervised = chat.ids[chat.loss_mask].tolist()
        answered = [
            text for text, message in zip(texts(line), line["messages"], strict=True) if message["role"] == "assistant"
        ]
        assert supervised.count(1) == len(answered) - (not line["finished"])
        assert (supervised[-1] == 1) == line["finished"]
        assert tokenizer.decode(supervised, skip_special_tokens=True) == " ".join(answered)
    assert {line["finished"] for line in written} == {True, False}


END = "<|im_end|>"
LAST = [Message("user", "hi"), Message("assistant", "yo"), Message("user", "more"), Message("assistant", "cut o")]
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("eos", "template", "last"),
    [
        (END, CHATML + ASKS, "cut o"),
        ("<|endoftext|>", CHATML + ASKS, "cut o"),  # Phi-3: the tokenizer's end token isn't the turn's
        ("<|im_start|>", CHATML + ASKS, "cut o"),
        (END, CHATML.replace("<|im_end|>\n", "") + ASKS, "cut o"),  # nothing ends a turn
        (END, CHATML + ASKS, "a"),
        (END, CHATML + ASKS, "cut\n"),
        (END, CHATML + ASKS, "cut<|im_end|>\n"),
    ],
    ids=str,
)
def test_the_end_of_turn_is_what_the_template_puts_behind_any_answer(
    tokenizer: PreTrainedTokenizerFast, eos: str, template: str, last: str
) -> None:
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    messages = [*LAST[:3], Message("assistant", last)]
    ids, mask = encode_chat(tokenizer, messages, 1000, ends=False)
    whole, whole_mask = encode_chat(tokenizer, messages, 1000)
    behind = "" if "im_end" not in template else f"{END}\n"
    assert str(tokenizer.decode(ids)).endswith(f"assistant\n{last}")
    assert str(tokenizer.decode(whole)) == f"{tokenizer.decode(ids)}{behind}"
    assert mask == whole_mask[: len(mask)]


def test_a_cut_answer_beyond_max_length_leaves_earlier_ones_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    start = len(encode_prompt(tokenizer, LAST[:3]))
    for length in (start + 2, start, start - 3):
        assert encode_chat(tokenizer, LAST, length, ends=False) == encode_chat(tokenizer, LAST[:2], length)


def test_ids_survive_so_the_split_stays_the_same(
    run: Any, write: Any, answers: Any, settings: Any, opened: Any
) -> None:
    """With ids, without, in chunks, and numbered rows, of which only the first 128 count as chunks of one chat."""
    rows = [row(i, turns=1, id=f"n_{i}") for i in range(170)]
    rows += [row(i, turns=1, id=f"chat{i // 3}_{i % 3}") for i in range(60)]
    rows += [row(i, turns=1) for i in range(40)]
    for i, each in enumerate(rows):
        each["messages"][0]["content"] += f" w{i % 28} w{i // 28}"
    write(rows)
    answers({i: [[10, 11]] for i in range(len(rows))})
    written, _ = run()
    assert [line.get("id") for line in written] == [each.get("id") for each in rows]
    sides = []
    for path in (settings.dataset.path, settings.output):
        prepared = prepare(
            opened[1], Source("jsonl", path=str(path)), max_length=60, train_tokens=None, heldout_tokens=10**6
        )
        sides.append([prompt[-1].content for prompt in prepared.heldout_prompts])
    assert sides[0] == sides[1]
    assert 3 < len(sides[0]) < 60


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_killed_command_goes_on_without_loss_or_duplicates(
    folder: Path, run: Any, settings: RegenerateSettings, write: Any, tmp_path: Path
) -> None:
    write([row(i, turns=1 + i % 3, id=f"id{i}") for i in range(90)])
    sampled: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "max_new_tokens": 15, "slots": 3}
    run(output=tmp_path / "whole.jsonl", **sampled)
    whole = (tmp_path / "whole.jsonl").read_text()

    command = [sys.executable, "-m", "data", "regenerate", "target=hf", f"target.path={folder / 'target'}"]
    command += ["target.dtype=float64", "dataset=jsonl", f"dataset.path={settings.dataset.path}"]
    command += [
        f"output={settings.output}",
        "max_length=60",
        *(f"{key}={value}" for key, value in sampled.items()),
        "top_p=1.0",
    ]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    while process.poll() is None and not (settings.output.exists() and settings.output.stat().st_size > 2000):
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)  # it holds the file and is alive
    with pytest.raises(DraftwrightError, match=r"another run is writing .*own\.jsonl: wait .* another output=FILE$"):
        run(**sampled)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    found = settings.output.read_bytes()
    kept = [json.loads(line)["row"] for line in found.splitlines(keepends=True) if line.endswith(b"\n")]
    left = len(whole.splitlines()) - len(kept)
    assert len(kept) > 3
    assert left > 3

    result = subprocess.run(command, capture_output=True, timeout=300, check=False, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{left} conversations kept, " in result.stdout
    assert settings.output.read_text() == whole
    names = ["chats.jsonl", *(f"{name}.jsonl{end}" for name in ("own", "whole") for end in ("", ".lock", ".run"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_torn_last_line_is_removed(run: Any, settings: RegenerateSettings) -> None:
    run(limit=6)
    whole = settings.output.read_bytes()
    last = whole.rstrip().rindex(b"\n") + 1
    for cut in (last, last + 1, last + 5, last + 9, len(whole) - 20, len(whole) - 1):
        settings.output.write_bytes(whole[:cut])
        assert read_rows(settings.output, chat_row) == {0, 1, 2, 3, 4}
        assert settings.output.read_bytes() == whole[:last]
        settings.output.write_bytes(whole[:cut])
        run(limit=6)
        assert settings.output.read_bytes() == whole


def test_lines_in_another_order_are_put_in_the_sources(run: Any, settings: RegenerateSettings) -> None:
    """As a killed run leaves them."""
    run()
    whole = settings.output.read_bytes()
    settings.output.write_bytes(b"".join(whole.splitlines(keepends=True)[8:3:-1]))
    run()
    assert settings.output.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"temperature": 0.5}, "temperature=0.0, not 0.5"),
        ({"top_k": 3}, "top_k=0, not 3"),
        ({"top_p": 0.5}, "top_p=1.0, not 0.5"),
        ({"seed": 1}, "seed=0, not 1"),
        ({"turns": 1}, "turns=null, not 1"),
        ({"max_length": 61}, "max_length=60, not 61"),
        ({"max_new_tokens": 8}, "max_new_tokens=9, not 8"),
    ],
    ids=str,
)
def test_other_settings_do_not_continue_a_file(run: Any, settings: Any, changes: Any, sentence: str) -> None:
    run(limit=3)
    before = settings.output.read_bytes()
    with pytest.raises(DraftwrightError, match=rf"own.jsonl was written with {sentence}: .* choose another output=FIL"):
        run(**changes)
    assert settings.output.read_bytes() == before
    assert len(run(limit=5, slots=2)[0]) == 5  # how many, and how many at once, don't change answers


def test_other_data_and_other_targets_do_not_continue_a_file(
    run: Any, write: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(limit=3)
    write(CHATS[1:])
    with pytest.raises(DraftwrightError, match=r"was written with dataset=chats.jsonl \w+, not chats.jsonl \w+: "):
        run()
    write(CHATS)
    monkeypatch.setattr(opened[0], "identity", lambda: "another")
    with pytest.raises(DraftwrightError, match=r"was written with target=target \w+, not target another: "):
        run()


@pytest.mark.parametrize("content", [None, b"", b"{}\n", b"[1]\n", b"\xff\n"], ids=str)
def test_answers_of_unknown_settings_are_not_continued(run: Any, settings: Any, content: bytes | None) -> None:
    run(limit=3)
    beside = settings.output.with_name("own.jsonl.run")
    beside.unlink() if content is None else beside.write_bytes(content)
    with pytest.raises(DraftwrightError, match=r"can't be continued, since own.jsonl.run, .* choose another output=F"):
        run()


def test_a_dropped_chat_is_not_asked_again(
    run: Any, settings: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, report = run()
    assert report.dropped == {"answer without text": 1}
    beside = settings.output.with_name("own.jsonl.run")
    noted = beside.read_bytes()
    assert noted.endswith(b'{"row": 9, "dropped": "answer without text"}\n')
    for torn in (noted[:-1], noted[:-20]):  # noted again
        beside.write_bytes(torn)
        assert run()[0] == written
        assert beside.read_bytes() == noted
    monkeypatch.setattr(opened[0], "forward", lambda *_, **__: pytest.fail("the target ran"))
    again, report = run()
    assert (again, report.kept, report.dropped) == (written, 0, {})


FOREIGN = {
    "an array on one line": b'[{"messages": [{"role": "user", "content": "w1"}]}]',
    "an object on one line": b'{"messages": [{"role": "user", "content": "w1"}]}',
    "a pretty object": b'{\n  "row": 1\n}\n',
    "chats": b'{"messages": [{"role": "user", "content": "w1"}]}\n{"messages": []}\n',
    "rows of something else": b'{"row": 1, "text": "w1"}\n',
    "rows named by text": b'{"row": "1", "finished": true, "messages": [1]}\n',
    "a list": b"[1, 2]\n",
    "text": b"some notes\nwithout an end",
    "one word": b"notes",
    "a number": b"3\n",
    "not UTF-8": b"\xff\xfe\x00\n",
    "ours, then something else": b'{"row": 0, "finished": true, "messages": [1]}\nnotes',
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_something_else_is_refused_and_stays_as_it_is(case: str, run: Any, settings: Any) -> None:
    settings.output.write_bytes(FOREIGN[case])
    with pytest.raises(DraftwrightError, match=r"own.jsonl can't be continued, line \d isn't one") as refused:
        run()
    assert "\n" not in str(refused.value)
    assert "choose another output=FILE" in str(refused.value)
    assert settings.output.read_bytes() == FOREIGN[case]


# --- mistakes and full disks -----------------------------------------------------------------------------------------


def test_a_full_disk_keeps_what_is_written(
    run: Any, settings: RegenerateSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = run()
    settings.output.unlink()
    count, write_line = iter(range(100)), AnswerFile.add

    def fail(*arguments: Any) -> None:
        if next(count) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_line(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "add", fail)
        with pytest.raises(
            DraftwrightError, match=r"own.jsonl .*No space left on device.*: free space, or .* is kept$"
        ):
            run()
    assert len(lines(settings.output)) == 5
    assert run()[0] == whole


@pytest.mark.parametrize("place", ["/sys/own.jsonl", "chats.jsonl/own.jsonl", "."])
def test_a_place_that_cannot_be_written_is_one_sentence(run: Any, tmp_path: Path, place: str) -> None:
    before = (tmp_path / "chats.jsonl").read_bytes()
    with pytest.raises(DraftwrightError, match="choose another output=FILE") as refused:
        run(output=tmp_path / place)
    assert "\n" not in str(refused.value)
    assert str(tmp_path / place) in str(refused.value)
    assert (tmp_path / "chats.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "chats.jsonl does not exist: correct dataset.path"),
        ("", "chats.jsonl is empty"),
        (
            '{"text": 1}\n{"messages": 3}\n',
            r"holds no usable conversation \(1 × conversation is not a list \(line 2\), 1 × no known",
        ),
    ],
    ids=["missing", "empty", "unusable"],
)
def test_a_source_without_chats_is_one_sentence_and_leaves_no_file(
    run: Any, settings: RegenerateSettings, tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "chats.jsonl"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DraftwrightError, match=message):
        run()
    assert not settings.output.exists()


def test_more_tokens_than_the_target_has_positions_are_refused(run: Any, settings: RegenerateSettings) -> None:
    with pytest.raises(DraftwrightError, match=f"max_length=97 exceeds the {POSITIONS} positions of target 'target'"):
        run(max_length=POSITIONS + 1)
    assert not settings.output.exists()
    run(max_length=POSITIONS, limit=1)


BAD = {
    "no output": ([], r"the config key 'output' has no value: pass output=…"),
    "nothing to draw from": (["output=x.jsonl", "top_p=0"], "0 < top_p <= 1"),
    "no turn": (["output=x.jsonl", "turns=0"], "turns=0 .* null or a whole number of at least 1"),
    "no slot": (["output=x.jsonl", "slots=0"], "slots=0 "),
    "unknown key": (["output=x.jsonl", "temprature=1"], "there is no config key 'temprature'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["data", "regenerate", *words])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra's would outlive the captured stream
    with pytest.raises(SystemExit) as ended:
        main()
    text = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(text.strip().splitlines()) == 1
    assert re.search(expected, text)
    assert not list(tmp_path.glob("*.jsonl"))
