"""Shared fixtures, made without network: a small tokenizer with a ChatML template, and tiny random Llamas.

Tests can't import this file (--import-mode=importlib), so helpers come as fixtures that return functions.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spec_decode.toy import MultiLayerCausalLM

torch.set_num_threads(1)  # models are tiny, and a second test process has the other core

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte (ids 3 to 258); ids 0 to 2 are <|endoftext|>, <|im_start|> and <|im_end|>."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(specials + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    wrapped.chat_template = CHATML
    return wrapped


def _tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """tiny_llama(seed=0, **fields of LlamaConfig): a random model of 50 tokens, hidden size 32 and 8 layers in fp32."""
    return _tiny_llama


@pytest.fixture(scope="session")
def exact_target() -> Callable[..., MultiLayerCausalLM]:
    """exact_target(**arguments): a random transformer of 64 tokens, 4 layers, 96 positions and no end-of-turn, in fp64
    throughout."""

    def make(**changes: Any) -> MultiLayerCausalLM:
        return MultiLayerCausalLM(
            **{"vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_positions": 96} | changes
        )

    return make


@pytest.fixture(scope="session")
def chi_square() -> Callable[[Tensor, Tensor], None]:
    """chi_square(counts, expected): fails if the counts are unlikely under the expected ones, which happens to right
    ones once in 10,000 seeds. Cells of less than five expected are taken together."""

    def check(counts: Tensor, expected: Tensor) -> None:
        rare = expected < 5
        observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
        wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
        cells = wanted >= 5
        df = int(cells.sum()) - 1
        chi2 = float(((observed - wanted)[cells] ** 2 / wanted[cells]).sum())
        # The 99.99 % quantile, by Wilson and Hilferty's approximation.
        bound = df * (1 - 2 / (9 * df) + 3.719 * math.sqrt(2 / (9 * df))) ** 3
        assert chi2 < bound, f"chi-square {chi2:.1f} with {df} degrees of freedom exceeds {bound:.1f}"

    return check


TURNS = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }}{{ ' <eos> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)


@pytest.fixture(scope="session")
def make_world() -> Callable[[Path], Path]:
    """make_world(folder): writes target/, a tiny model whose tokens are whole words, and chats.jsonl into a folder."""

    def make(folder: Path) -> Path:
        vocabulary = ["<pad>", "<eos>", "<user>", "<bot>", *(f"w{i}" for i in range(60))]
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
        tokenizer.chat_template = TURNS
        tokenizer.save_pretrained(folder / "target")
        sizes = {"intermediate_size": 64, "vocab_size": len(vocabulary), "max_position_embeddings": 256}
        _tiny_llama(**sizes, eos_token_id=1, pad_token_id=0).save_pretrained(folder / "target")
        lines = []
        for i in range(60):
            turns = [
                (role, " ".join(f"w{(i * 7 + j * k) % 60}" for j in range(12)))
                for k, role in ((1, "user"), (2, "assistant"))
            ]
            lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
        lines.append(json.dumps({"messages": [{"role": "user", "content": "w1"}]}))
        (folder / "chats.jsonl").write_text("\n".join(lines))
        return folder

    return make


@pytest.fixture
def train_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """train_in(world, *words, sweep=False): `python -m train [-m]` in this process, brief unless the words say so."""
    from train.cli import main

    fixed = ["target=hf", "target.path=target", "target.dtype=float32", "dataset=jsonl", "dataset.path=chats.jsonl"]
    fixed.append("dataset.decontaminate=null")  # the hub isn't asked
    small = ["tokens_per_batch=64", "train_tokens=600", "heldout_tokens=60", "max_length=64", "draft_vocab_size=40"]
    brief = ["max_steps=4", "eval.max_new_tokens=4", "trainer.log_every_n_steps=2", "trainer.val_check_interval=4"]

    def run(world: Path, *words: str, sweep: bool = False) -> None:
        monkeypatch.chdir(world)
        monkeypatch.setenv("DRAFTWRIGHT_CACHE", str(world / "cache"))
        monkeypatch.setattr(logging.getLogger(), "handlers", [])  # Hydra's would outlive the captured stream
        monkeypatch.setattr(sys, "argv", ["train", *["-m"] * sweep, *fixed, *small, *brief, *words])
        main()

    return run


@pytest.fixture
def refused_early(
    train_in: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """refused_early(world, *words): the sentence that training ends with before it captures anything."""

    def call(world: Path, *words: str) -> str:
        monkeypatch.setattr("train.inputs.cached_features", lambda *_, **__: pytest.fail("states were captured"))
        with pytest.raises(SystemExit) as ended:
            train_in(world, *words, f"output_dir={tmp_path}", "logger=none")
        assert ended.value.code == 2
        return capsys.readouterr().err.strip().splitlines()[-1].removeprefix("train: ")

    return call
