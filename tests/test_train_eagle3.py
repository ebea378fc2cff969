"""EAGLE-3's training-time test: the unrolled states are those that decoding computes, and what they cost."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.alignment import align
from data.batch import Sequences
from data.features import Features
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.feature_drafter import TreeStep
from spec_decode.target_hf import HFTarget
from train.eagle3 import Eagle3Module
from train.losses import soft_cross_entropy

VOCABULARY, DRAFT_VOCABULARY = 60, 40


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return HFTarget(LlamaForCausalLM(config).double(), "tiny")


def make_module(target, steps=3, **options):
    torch.manual_seed(1)
    draft = Eagle3Draft(Eagle3Config.for_target(target.spec, draft_vocab_size=DRAFT_VOCABULARY, **options))
    draft.set_vocabulary(torch.arange(10, 10 + DRAFT_VOCABULARY))
    draft.init_head(target.head_weight())
    draft.bind(target)
    return Eagle3Module(
        draft.double(), target, steps=steps, decay=0.8, loss=soft_cross_entropy, lr=0.0, optimizer=None, schedule=None
    )


def make_sequences(*lengths, prompt=3):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (sum(lengths),), generator=generator, dtype=torch.int32)
    masks = [torch.arange(length) >= prompt for length in lengths]
    return Sequences(ids, torch.cat(masks), torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.parametrize(
    "options", [{}, {"fusion": "linear"}, {"fc_norm": True, "norm_output": True}], ids=["split", "linear", "3.1"]
)
def test_training_and_decoding_compute_the_same_chain(target, options):
    module = make_module(target, steps=4, **options)
    sequences = make_sequences(14)
    batch = Features(target, sequences, module.draft.taps).batch([0])
    rows = torch.arange(10)
    with torch.inference_mode():
        unrolled = module.unroll(batch, rows)

    def check(fed, logp, wanted):
        normed = fed if module.draft.config.norm_output else module.draft.norm(fed)
        torch.testing.assert_close(normed, wanted, rtol=0, atol=1e-9)
        torch.testing.assert_close(logp.double(), module.draft.lm_head(wanted).log_softmax(-1), rtol=0, atol=1e-5)

    for row in (1, 5, 9):
        ids = batch.ids[: row + 1]
        with torch.inference_mode():
            output = target.forward(ids[None], taps=module.draft.taps)
            state = module.draft.start(output, ids)
            last, logp = module.draft._advance(state, int(batch.ids[row + 1]))
            check(last[0], logp, unrolled[0, row])
            step = TreeStep(module.draft, state, last)
            for depth in range(1, 4):
                logp = step(batch.ids[row + 1 + depth][None], torch.tensor([depth - 2]))
                check(step.states[-1], logp[0], unrolled[depth, row])


def test_packed_documents_do_not_see_each_other(target):
    module = make_module(target)
    sequences = make_sequences(9, 12, 7)
    source = Features(target, sequences, module.draft.taps)
    together, _ = module._loss(module._unrolled(source.batch([2, 0, 1])))

    def weighted_sum(documents):
        batch = source.batch(documents)
        counts = align(batch.loss_mask, batch.offsets, 3).valid.sum(1)
        _, means = module._loss(module._unrolled(batch))
        return means.detach() * counts, counts

    sums, counts = zip(*(weighted_sum([document]) for document in range(3)), strict=True)
    means = sum(sums) / sum(counts)
    assert together.item() == pytest.approx(sum(0.8**k * mean for k, mean in enumerate(means)).item(), rel=1e-6)


def test_the_loss_is_the_mean_over_supervised_tokens_of_every_step(target):
    """Straight from the definition: chains, target distributions over the draft vocabulary, 0.8^k."""
    module = make_module(target)
    sequences = make_sequences(11, prompt=4)
    batch = Features(target, sequences, module.draft.taps).batch([0])
    with torch.inference_mode():
        states = module.unroll(batch, torch.arange(11))
        p = target.head(batch.last_hidden)[:, 10:50].softmax(-1)
        wanted = 0.0
        for step in range(3):
            losses = [
                soft_cross_entropy(module.draft.lm_head(states[step, row]), p[row + 1 + step])
                for row in range(11)
                if row + 2 + step < 11 and batch.loss_mask[row + 2 + step]
            ]
            wanted += 0.8**step * torch.stack(losses).mean()
    loss, _ = module._loss(module._unrolled(batch))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_row_before_the_answer_learns(target):
    """The first draft after a prompt starts at the last prompt row: its loss must have a gradient."""
    module = make_module(target, steps=1)
    sequences = make_sequences(6, prompt=4)  # x4, x5 supervised; row 3 predicts x5, row 2 predicts x4
    batch = Features(target, sequences, module.draft.taps).batch([0])
    batch.features.requires_grad_()
    loss, _ = module._loss(module._unrolled(batch))
    loss.backward()
    assert batch.features.grad[3].abs().sum() > 0
    assert batch.features.grad[4:].abs().sum() == 0
