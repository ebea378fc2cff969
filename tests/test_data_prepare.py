import json
from pathlib import Path

import pytest
import torch

from data.messages import Message
from data.prepare import prepare
from data.readers import ReadReport
from data.sources import Source, open_rows
from spec_decode.errors import DraftwrightError

MALFORMED = Path(__file__).parents[2] / "shared" / "data" / "malformed"
KEPT = {
    "01": 2, "02": 2, "03": 1, "04": 2, "05": 1, "07": 2, "08": 8, "09": 2, "10": 3, "12": 2, "14": 2, "15": 2,
    "18": 3, "20": 2, "21": 3, "24": 7,
}  # fmt: skip


def row(identity, question, answer="a"):
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns} if identity is None else {"id": identity, "conversations": turns}


def source(tmp_path, rows):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return Source("jsonl", path=str(path))


def run(tokenizer, source, train_tokens=None, heldout_tokens=10**9, max_length=200):
    return prepare(tokenizer, source, max_length=max_length, train_tokens=train_tokens, heldout_tokens=heldout_tokens)


def texts(tokenizer, sequences):
    """The question of each document."""
    return [tokenizer.decode(ids).split("user\n")[1].split("<|im_end|>")[0] for ids, _ in sequences]


def test_sides_are_disjoint_complete_and_keep_chunks_together(tokenizer, tmp_path):
    rows = [row(f"chat{chat}_{chunk}", f"c{chat}k{chunk}") for chat in range(150) for chunk in (0, 1, 5)]
    prepared = run(tokenizer, source(tmp_path, rows))
    train, heldout = texts(tokenizer, prepared.train), texts(tokenizer, prepared.heldout)
    assert sorted(train + heldout) == sorted(f"c{chat}k{chunk}" for chat in range(150) for chunk in (0, 1, 5))
    chats = [{text.split("k")[0] for text in side} for side in (train, heldout)]
    assert not chats[0] & chats[1]
    assert 3 * len(chats[1]) == len(heldout) > 0
    assert prepared.heldout_prompts == [[Message("user", text)] for text in heldout]
    assert prepared.report.kept == 450


def test_side_depends_on_neither_budgets_nor_order(tokenizer, tmp_path):
    rows = [row(None, f"question {i}") for i in range(300)]
    everything = run(tokenizer, source(tmp_path, rows))
    part = run(tokenizer, source(tmp_path, rows[::-1]), train_tokens=2000, heldout_tokens=100)
    assert set(texts(tokenizer, part.heldout)) < set(texts(tokenizer, everything.heldout))
    assert set(texts(tokenizer, part.train)) < set(texts(tokenizer, everything.train))
    longest = max(len(ids) for ids, _ in part.train)
    assert 2000 <= len(part.train.ids) < 2000 + longest
    assert 100 <= len(part.heldout.ids) < 100 + longest


def test_numbered_rows_are_not_taken_for_one_chat(tokenizer, tmp_path):
    prepared = run(tokenizer, source(tmp_path, [row(f"row_{i}", f"question {i}") for i in range(500)]))
    assert 5 < len(prepared.heldout) < 50


def test_copies_under_another_id_do_not_leak(tokenizer, tmp_path):
    rows = [row(f"id{i}", f"question {i % 20}") for i in range(400)]
    prepared = run(tokenizer, source(tmp_path, rows))
    assert not set(texts(tokenizer, prepared.train)) & set(texts(tokenizer, prepared.heldout))
    assert prepared.report.dropped["copy of a chat on the other side of the held-out split"] > 0


def test_few_chats_still_hold_one_out(tokenizer, tmp_path):
    prepared = run(tokenizer, source(tmp_path, [row(f"x{i}", f"question {i}") for i in range(3)]), train_tokens=10**6)
    assert (len(prepared.train), len(prepared.heldout)) == (2, 1)
    assert prepared.report.warnings == [
        f"the data ended after {len(prepared.train.ids)} of the 1,000,000 tokens to count or train on"
    ]
    numbered = run(tokenizer, source(tmp_path, [row(f"x_{i}", f"question {i}") for i in range(3)]))
    assert (len(numbered.train), len(numbered.heldout)) == (2, 1)


def test_one_chat_is_trained_on(tokenizer, tmp_path):
    prepared = run(tokenizer, source(tmp_path, [row("x", "q")]))
    assert (len(prepared.train), len(prepared.heldout)) == (1, 0)
    assert prepared.report.warnings == ["only one conversation, so none is held out"]


def test_nothing_held_out_on_request(tokenizer, tmp_path):
    prepared = run(tokenizer, source(tmp_path, [row(None, f"question {i}") for i in range(100)]), heldout_tokens=0)
    assert (len(prepared.train), len(prepared.heldout), prepared.heldout_prompts) == (100, 0, [])


def test_sequences_hold_the_encoded_chats(tokenizer, tmp_path):
    prepared = run(tokenizer, source(tmp_path, [row("x", "q", "answer")]))
    ids, mask = prepared.train[0]
    assert tokenizer.decode(ids[mask]) == "answer<|im_end|>\n"
    assert (ids.dtype, mask.dtype, prepared.train.offsets.dtype) == (torch.int32, torch.bool, torch.int64)


def test_unusable_rows_are_named_with_their_counts(tokenizer, tmp_path):
    rows = [{"id": "a", "conversations": []}, {"id": "b"}, {"id": "c"}]
    with pytest.raises(
        DraftwrightError,
        match=r"no usable conversation \(2 × no known conversation field \(line 2, line 3\), 1 × empty conversation ",
    ):
        run(tokenizer, source(tmp_path, rows))


def test_empty_masks_show_a_decoded_example(tokenizer, tmp_path):
    with pytest.raises(DraftwrightError, match="has a supervised token") as error:
        run(tokenizer, source(tmp_path, [row("x", "what?", "this")] * 2), max_length=10)
    assert "2 × no supervised token within max_length" in str(error.value)
    assert repr("<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\nthis<|im_end|>\n") in str(error.value)


def test_impossible_budget(tokenizer, tmp_path):
    with pytest.raises(DraftwrightError, match="train_tokens=0"):
        run(tokenizer, source(tmp_path, [row("x", "q")]), train_tokens=0)


@pytest.mark.parametrize("number", [*KEPT, "22", "26"])
def test_malformed_files(tokenizer, number):
    if not MALFORMED.is_dir():
        pytest.skip(f"{MALFORMED} is not here")
    path = next(MALFORMED.glob(f"{number}_*"))
    file = Source("jsonl", path=str(path))
    if number not in KEPT:
        with pytest.raises(DraftwrightError, match="no usable conversation"):
            run(tokenizer, file, heldout_tokens=0, max_length=2000)
        return
    report = run(tokenizer, file, heldout_tokens=0, max_length=2000).report
    unreadable = ReadReport()
    rows = len(list(open_rows(file, unreadable))) + unreadable.dropped.total()
    assert (report.kept, report.kept + report.dropped.total()) == (KEPT[number], rows)
