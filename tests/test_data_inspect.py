import io

import torch
from rich.console import Console

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
