"""Print token sequences so that a person can see what is supervised."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.prepare import Chat
from data.readers import ReadReport

_SUPERVISED = "bold green"
_SPECIAL = "reverse"


def print_chats(console: Console, tokenizer: PreTrainedTokenizerBase, chats: list[Chat], report: ReadReport) -> None:
    """Print each chat with supervised tokens in green (between ⟦ ⟧ where there is no colour), then the report."""
    for number, chat in enumerate(chats, 1):
        share = f"{int(chat.loss_mask.sum())} of {len(chat.ids)} tokens supervised"
        console.rule(Text(f"{number}: {share}"))
        console.print(coloured(tokenizer, chat.ids, chat.loss_mask, brackets=console.color_system is None))
    console.rule()
    for line in report.lines():
        console.print(Text(line))
    tokens = sum(len(chat.ids) for chat in chats)
    supervised = sum(int(chat.loss_mask.sum()) for chat in chats)
    share = f"{supervised / tokens:.1%}" if tokens else "none"
    console.print(Text.assemble(f"{share} of {tokens} tokens shown are ", ("supervised", _SUPERVISED)))


def coloured(tokenizer: PreTrainedTokenizerBase, ids: Tensor, loss_mask: Tensor, *, brackets: bool = False) -> Text:
    """The decoded ids [T]; supervised ones styled (and in ⟦ ⟧ with `brackets`), special tokens shown in reverse."""
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    text = Text()
    for supervised, span in groupby(zip(ids.tolist(), loss_mask.tolist(), strict=True), key=lambda pair: pair[1]):
        text.append("⟦" if supervised and brackets else "")
        # Neighbours are decoded together: one character may take several tokens.
        for is_special, run in groupby((token for token, _ in span), key=special.__contains__):
            styles = [_SUPERVISED] * supervised + [_SPECIAL] * is_special
            text.append(str(tokenizer.decode(list(run), skip_special_tokens=False)), style=" ".join(styles))
        text.append("⟧" if supervised and brackets else "")
    return text
