import pytest

from data.chat import encode_chat, encode_prompt
from data.messages import Message, UnusableRow
from spec_decode.errors import DraftwrightError

END = "<|im_end|>\n"
TURNS = [Message("user", "hi"), Message("assistant", "yo"), Message("user", "more"), Message("assistant", "ok")]


def spans(tokenizer, ids, mask):
    """[(supervised, text)] of neighbouring tokens with the same mask."""
    runs: list[list] = []
    for token, supervised in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != supervised:
            runs.append([supervised, []])
        runs[-1][1].append(token)
    return [(supervised, tokenizer.decode(run)) for supervised, run in runs]


def test_answers_and_their_ends_are_supervised(tokenizer):
    ids, mask = encode_chat(tokenizer, TURNS, 1000)
    assert spans(tokenizer, ids, mask) == [
        (False, f"<|im_start|>user\nhi{END}<|im_start|>assistant\n"),
        (True, f"yo{END}"),
        (False, f"<|im_start|>user\nmore{END}<|im_start|>assistant\n"),
        (True, f"ok{END}"),
    ]
    assert all(type(value) is bool for value in mask)


def test_ids_are_the_template_of_the_whole_chat(tokenizer):
    ids, _ = encode_chat(tokenizer, TURNS, 1000)
    chat = [message.__dict__ for message in TURNS]
    assert ids == tokenizer.apply_chat_template(chat, return_dict=False)


def test_markers_inside_a_text_do_not_move_the_mask(tokenizer):
    fake = "x<|im_end|>\n<|im_start|>assistant\nfake"
    ids, mask = encode_chat(tokenizer, [Message("user", fake), Message("assistant", f"y{fake}")], 1000)
    assert spans(tokenizer, ids, mask) == [
        (False, f"<|im_start|>user\n{fake}{END}<|im_start|>assistant\n"),
        (True, f"y{fake}{END}"),
    ]


def test_cut_at_max_length_and_behind_the_last_supervised_token(tokenizer):
    ids, mask = encode_chat(tokenizer, TURNS, 1000)
    first_end = mask.index(True) + 4  # y o <|im_end|> \n
    assert encode_chat(tokenizer, TURNS, first_end + 3) == (ids[:first_end], mask[:first_end])
    assert encode_chat(tokenizer, TURNS, first_end - 3) == (ids[: first_end - 3], mask[: first_end - 3])
    assert encode_chat(tokenizer, TURNS, first_end - 4) == ([], [])


def test_generation_prompt_that_the_answer_replaces_is_supervised_from_the_difference(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\nT'")
    ids, mask = encode_chat(tokenizer, TURNS[:2], 1000)
    assert spans(tokenizer, ids, mask)[1] == (True, f"yo{END}")


def test_template_that_rewrites_history_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + (m['content'] if loop.last else 'gone') }}{% endfor %}"
    )
    assert encode_chat(tokenizer, TURNS[:2], 1000)[0]
    with pytest.raises(DraftwrightError, match="changes earlier turns"):
        encode_chat(tokenizer, TURNS, 1000)


def test_refusing_template_and_missing_template(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    with pytest.raises(UnusableRow, match="refused by the chat template: no system turns"):
        encode_chat(tokenizer, TURNS, 1000)
    tokenizer.chat_template = None
    with pytest.raises(DraftwrightError, match="has no chat template"):
        encode_chat(tokenizer, TURNS, 1000)


def test_prompt_ends_with_the_generation_prompt(tokenizer):
    text = tokenizer.decode(encode_prompt(tokenizer, TURNS[:1]))
    assert text == f"<|im_start|>user\nhi{END}<|im_start|>assistant\n"
