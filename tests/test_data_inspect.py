import io
import json

import pytest
import torch
from rich.console import Console

from data import cli
from data.inspect import coloured, print_chats
from data.prepare import Chat
from data.readers import ReadReport


def chat(tokenizer):
    ids = [1, *tokenizer.encode("qé", add_special_tokens=False), *tokenizer.encode("a", add_special_tokens=False), 2]
    mask = torch.tensor([False] * (len(ids) - 2) + [True] * 2)
    return Chat("g", "g", torch.tensor(ids, dtype=torch.int32), mask, [])


def test_supervised_and_special_tokens_are_styled(tokenizer):
    example = chat(tokenizer)
    text = coloured(tokenizer, example.ids, example.loss_mask)
    assert text.plain == "<|im_start|>qéa<|im_end|>"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("<|im_start|>", "reverse"),
        ("a", "bold green"),
        ("<|im_end|>", "bold green reverse"),
    ]


def test_without_colour_brackets_show_the_mask(tokenizer):
    out = io.StringIO()
    report = ReadReport(kept=1)
    report.drop("empty conversation")
    print_chats(Console(file=out, width=80), tokenizer, [chat(tokenizer)], report)
    assert "1: 2 of 6 tokens supervised" in out.getvalue()
    assert "<|im_start|>qé⟦a<|im_end|>⟧\n" in out.getvalue()
    assert "1 conversations kept, 1 rows dropped: 1 × empty conversation\n" in out.getvalue()
    assert "33.3% of 6 tokens shown are supervised" in out.getvalue()


def test_markup_in_a_text_is_printed_as_it_is(tokenizer):
    ids = torch.tensor(tokenizer.encode("[bold]x[/bold]", add_special_tokens=False))
    assert coloured(tokenizer, ids, torch.zeros(len(ids), dtype=torch.bool)).plain == "[bold]x[/bold]"


@pytest.fixture
def inspect(monkeypatch, tmp_path):
    """Runs `python -m data inspect` on a file of one chat in an empty folder."""
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]})
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*words):
        fixed = ["inspect", "target=hf", "target.path=somewhere", "dataset=jsonl", "dataset.path=~/chats.jsonl"]
        monkeypatch.setattr("sys.argv", ["data", *fixed, *words])
        cli.main()

    return run


def test_command_prints_the_chat_and_leaves_nothing_behind(inspect, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "open_tokenizer", lambda source: tokenizer)
    inspect()
    assert "yes" in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("limit=0", "limit=0 is not possible: it must be a whole number of at least 1"),
        ("limit=abc", "limit=abc is not possible"),
        ("max_length=1", "max_length=1 is not possible: it must be a whole number of at least 2"),
        ("+foo=1", "'+foo=1' adds a key that nothing reads: override existing keys, without +"),
        ("+target.foo=1", "there is no config key 'target.foo'"),
        ("target.path=???", "the config key 'target.path' has no value"),
        ("dataset.path=4", "dataset.path=4 is not possible: it must be null or text"),
    ],
)
def test_mistakes_end_with_one_sentence(inspect, word, expected, monkeypatch, capsys):
    monkeypatch.setattr(cli, "open_tokenizer", lambda source: pytest.fail("the tokenizer was opened"))
    with pytest.raises(SystemExit) as ended:
        inspect(word)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"data: {expected}")
