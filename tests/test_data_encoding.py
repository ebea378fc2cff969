"""Rows become tokens once: what is kept on disk is found again exactly when it is still right."""

import json

import pytest
import torch

from data import encoding
from data.chat import encode_chat, encode_pieces
from data.encoding import Encoder, encode_rows
from data.messages import Message, UnusableRow
from data.prepare import prepare
from data.readers import ReadReport
from data.rows import usable_rows
from data.sources import Source
from spec_decode.errors import DraftwrightError

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TURNS = [Message(role, f"{role} {turn}") for turn in range(3) for role in ("user", "assistant")]


@pytest.fixture
def source(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * i}]}
        for i in range(1, 8)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Source("jsonl", path=str(tmp_path / "chats.jsonl"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(tokenizer, source, max_length, split): what became of the rows, and how many of them were encoded now."""
    monkeypatch.setattr(encoding, "BLOCK", 3)
    monkeypatch.setattr(encoding.os, "cpu_count", lambda: None)  # in this process, so that calls can be counted
    calls = []
    encode = Encoder.encode

    def counted(self, messages, ends):
        calls.append(messages)
        return encode(self, messages, ends)

    monkeypatch.setattr(Encoder, "encode", counted)

    def go(tokenizer, source, max_length=60, split=False, cache=tmp_path / "cache"):
        before = len(calls)
        rows = usable_rows(source, ReadReport())
        found = [encoded for _, encoded in encode_rows(Encoder(tokenizer, max_length, split), rows, cache)]
        return found, len(calls) - before

    return go


def lists(found):
    return [[(piece.start, piece.ids.tolist(), piece.loss_mask.tolist()) for piece in one.pieces] for one in found]


def test_the_cache_holds_what_encoding_gives(run, tokenizer, source):
    first, encoded = run(tokenizer, source)
    again, encoded_again = run(tokenizer, source)
    direct, _ = run(tokenizer, source, cache=None)
    assert (encoded, encoded_again) == (7, 0)
    assert lists(first) == lists(again) == lists(direct)
    assert [(piece.ids.dtype, piece.loss_mask.dtype) for piece in again[0].pieces] == [(torch.int32, torch.bool)]


def test_another_length_template_or_split_is_encoded_anew(run, tokenizer, source):
    run(tokenizer, source)
    assert run(tokenizer, source, max_length=59)[1] == 7
    assert run(tokenizer, source, split=True)[1] == 7
    tokenizer.eos_token = "<|endoftext|>"
    assert run(tokenizer, source)[1] == 7
    tokenizer.chat_template = tokenizer.chat_template.replace("\n", "\n\n")
    assert run(tokenizer, source)[1] == 7


def test_an_edited_file_loses_the_blocks_that_changed_alone(run, tokenizer, source, tmp_path):
    run(tokenizer, source)
    path = tmp_path / "chats.jsonl"
    path.write_text(path.read_text().replace("q5", "Q5"))
    found, encoded = run(tokenizer, source)
    assert encoded == 3
    assert "Q5" in tokenizer.decode(found[4].pieces[0].ids)


def test_a_killed_run_goes_on_behind_its_last_whole_block(run, tokenizer, source, tmp_path):
    rows = usable_rows(source, ReadReport())
    next(encode_rows(Encoder(tokenizer, 60, False), rows, tmp_path / "cache"))
    assert run(tokenizer, source)[1] == 4


def test_several_processes_give_the_same(run, tokenizer, source, tmp_path, monkeypatch):
    direct, _ = run(tokenizer, source, cache=None)
    monkeypatch.setattr(encoding.os, "cpu_count", lambda: 2)
    assert lists(run(tokenizer, source)[0]) == lists(direct)


def test_refused_and_unsupervised_rows_survive_the_cache(run, tokenizer, source):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for", "{% if messages[0]['content'] == 'q2' %}{{ raise_exception('no q2') }}{% endif %}{% for", 1
    )
    length = len(encode_chat(tokenizer, [Message("user", "q1"), Message("assistant", "a")], 60)[0])
    for _ in range(2):
        found, _ = run(tokenizer, source, max_length=length)
        assert found[1].reason == "refused by the chat template: no q2"
        assert [len(one.pieces) for one in found] == [1, 0, 1, 1, 1, 1, 1]
        found, _ = run(tokenizer, source, max_length=10)
        assert [(len(one.pieces), one.reason) for one in found[::6]] == [(0, ""), (0, "")]


def test_training_uses_what_was_prepared(tokenizer, source, tmp_path, monkeypatch):
    arguments = {"max_length": 60, "train_tokens": 30, "heldout_tokens": 0, "cache_dir": tmp_path / "cache"}
    first = prepare(tokenizer, source, **arguments)
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("encoded again"))
    again = prepare(tokenizer, source, **arguments | {"train_tokens": None})
    assert torch.equal(again.train.prefix(30).ids, first.train.ids)


def test_a_folder_that_cannot_be_written_is_one_sentence(run, tokenizer, source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftwrightError, match=r"could not write encoded chats to .* set cache_dir=FOLDER"):
        run(tokenizer, source, cache=tmp_path / "file")


def pieces(tokenizer, messages, max_length, split=True):
    found = list(encode_pieces(tokenizer, messages, max_length, ends=True, split=split))
    return [start for start, _, _ in found], [tokenizer.decode(ids) for _, ids, _ in found]


def test_long_chats_are_cut_behind_a_whole_answer(tokenizer):
    two, mask = encode_chat(tokenizer, TURNS[:4], 1000)
    assert encode_chat(tokenizer, TURNS, len(two) + 20) == (two, mask)
    assert encode_chat(tokenizer, TURNS, len(two) - 1) == encode_chat(tokenizer, TURNS[:2], 1000)


def test_splitting_goes_on_with_the_next_question_behind_the_system_turn(tokenizer):
    system = Message("system", "s")
    text = [tokenizer.decode(encode_chat(tokenizer, [system, *TURNS[i : i + 2]], 1000)[0]) for i in (0, 2, 4)]
    length = len(encode_chat(tokenizer, [system, *TURNS[:2]], 1000)[0])
    assert pieces(tokenizer, [system, *TURNS], length) == ([1, 3, 5], text)
    assert pieces(tokenizer, [system, *TURNS], length, split=False) == ([1], text[:1])


def test_splitting_skips_questions_that_fill_a_piece(tokenizer):
    long = [Message("user", "x" * 100), Message("assistant", "y")]
    length = len(encode_chat(tokenizer, TURNS[:2], 1000)[0])
    assert pieces(tokenizer, [*TURNS[:2], *long, *TURNS[4:]], length)[0] == [0, 4]
    assert pieces(tokenizer, long, length) == ([], [])


def test_pieces_never_straddle_train_and_heldout(tokenizer, tmp_path):
    rows = [
        {"messages": [{"role": message.role, "content": f"{message.content} c{i}."} for message in TURNS]}
        for i in range(200)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Source("jsonl", path=str(tmp_path / "chats.jsonl"), split_long=True)
    prepared = prepare(tokenizer, source, max_length=70, train_tokens=None, heldout_tokens=10**6)
    chats = [
        {tokenizer.decode(ids).split(" c")[1].split(".")[0] for ids, _ in side}
        for side in (prepared.train, prepared.heldout)
    ]
    assert not chats[0] & chats[1]
    assert len(prepared.train) + len(prepared.heldout) == 600
    for (ids, _), prompt in zip(prepared.heldout, prepared.heldout_prompts, strict=True):
        assert prompt[0].content in tokenizer.decode(ids)


def test_tool_calls_and_reasoning_reach_the_template_or_cost_the_row(tokenizer):
    turns = [Message("user", "q"), Message("assistant", "", (CALL,), "think")]
    with pytest.raises(UnusableRow, match="tool call that the chat template leaves out"):
        encode_chat(tokenizer, turns, 1000)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{{ m.get('reasoning_content', '') }}"
        "{% for call in m.get('tool_calls', []) %}{{ call['function'] | tojson }}{% endfor %}{% endfor %}"
    )
    ids, mask = encode_chat(tokenizer, turns, 1000)
    said = tokenizer.decode([token for token, supervised in zip(ids, mask, strict=True) if supervised])
    assert said == 'think{"name": "add", "arguments": {"a": 2}}'
