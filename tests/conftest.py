"""Shared fixtures, made without network: a small tokenizer with a ChatML template, and tiny random Llamas.

Tests can't import this file (--import-mode=importlib), so helpers come as fixtures that return functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spec_decode.toy import MultiLayerCausalLM

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
