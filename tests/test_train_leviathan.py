"""Distilling a language model: training sees what decoding computes; the loss is that of the definition and falls."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from data.batch import Batch, Sequences
from data.features import Features
from data.module import DraftDataModule
from spec_decode.drafters.leviathan import LeviathanDraft
from spec_decode.target_hf import HFTarget
from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import StaticTree
from train.draft import build_draft
from train.leviathan import LeviathanModule
from train.losses import LOSSES
from train.module import Unrolled
from train.optim import build_optimizer, warmup_cosine

VOCABULARY = 60
LENGTHS, PROMPT = (9, 14, 7), 4


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(vocab_size=VOCABULARY, max_positions=64)


def make_module(target: HFTarget, steps: int = 3, loss: Any = "kl", decay: float = 0.0) -> LeviathanModule:
    torch.manual_seed(1)
    draft = build_draft(LeviathanDraft, target, torch.arange(VOCABULARY), "", num_layers=2)
    optimizer = partial(build_optimizer, name="muon", head_lr_scale=0.3)
    schedule = partial(warmup_cosine, warmup_steps=3, final_ratio=0.1)
    return LeviathanModule(
        draft, target, steps=steps, decay=decay, loss=loss, lr=0.01, optimizer=optimizer, schedule=schedule
    )


def make_sequences(*lengths: int) -> Sequences:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (sum(lengths),), generator=generator, dtype=torch.int32)
    masks = [torch.arange(length) >= PROMPT for length in lengths]
    return Sequences(ids, torch.cat(masks), torch.tensor([0, *lengths]).cumsum(0))


def make_batch(target: HFTarget) -> Batch:
    return Features(target, make_sequences(*LENGTHS), ()).batch([0, 1, 2])


def test_training_and_decoding_compute_the_same_chain(target: MultiLayerCausalLM) -> None:
    """The draft continues a prompt by itself; training on that text, packed behind another, finds its choices."""
    module = make_module(target, steps=4)
    draft = module.draft.double()
    prompt = torch.tensor([5, 17, 3, 2, 28])
    state = draft.start(None, prompt)  # type: ignore[arg-type]
    tree = draft.propose(state, 9, StaticTree((1,) * 4))
    ids = torch.cat((torch.arange(7), prompt, tree.tokens))
    nothing = torch.zeros(len(ids), 0)
    batch = Batch(ids, torch.ones(len(ids), dtype=torch.bool), torch.tensor([0, 7, len(ids)]), nothing, nothing)
    with torch.no_grad():
        logq = draft.model.head(module.unroll(batch, torch.tensor([7 + len(prompt) - 1]))[:, 0]).log_softmax(-1)
    assert logq.argmax(-1).tolist() == tree.tokens[1:].tolist()
    assert tree.log_q is not None
    torch.testing.assert_close(logq.amax(-1), tree.log_q[1:].double(), rtol=0, atol=1e-5)


def by_hand(module: LeviathanModule, batch: Batch, loss: Any) -> torch.Tensor:
    """Document by document, straight from the models."""
    values = []
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = batch.ids[None, start:stop]
        p = module.target.model(ids).logits[0].softmax(-1)  # type: ignore[attr-defined]
        logits = module.draft.lm(ids).logits[0]
        values += [loss(logits[at - 1], p[at - 1]) for at in range(PROMPT, int(stop - start))]
    return torch.stack(values).mean()


MIXTURE = {"kl": 0.5, "reverse_kl": 0.25, "total_variation": 2.0}


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "total_variation", MIXTURE], ids=str)
def test_loss_and_gradient_are_those_of_the_definition(target: MultiLayerCausalLM, loss: Any) -> None:
    module = make_module(target, loss=loss)
    module.draft.double()
    batch = make_batch(target)
    shares = loss if isinstance(loss, dict) else {loss: 1.0}
    wanted = by_hand(module, batch, lambda z, p: sum(share * LOSSES[name](z, p) for name, share in shares.items()))
    wanted.backward()
    gradients = {name: weight.grad for name, weight in module.draft.named_parameters()}
    module.draft.zero_grad(set_to_none=True)
    value, by_step = module._loss(module._unrolled(batch))
    value.backward()
    assert value.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert by_step.tolist() == pytest.approx([wanted.item()], rel=1e-5)
    for name, weight in module.draft.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=name)


def test_every_step_sees_the_same_prediction_of_a_token(target: MultiLayerCausalLM) -> None:
    module = make_module(target)
    unrolled: Unrolled = module._unrolled(make_batch(target))
    assert unrolled.states.shape == (3, sum(length - PROMPT for length in LENGTHS), 16)
    assert torch.equal(unrolled.states[1], unrolled.states[0])
    assert torch.equal(unrolled.states[2], unrolled.states[0])
    module._measure(unrolled, module.val_metrics)
    metrics = module.val_metrics.compute()
    assert unrolled.alignment.valid.all()
    assert metrics["loss/0"] == metrics["loss/1"] == metrics["loss/2"]


def test_the_tied_matrix_is_trained_once_and_among_the_heads(target: MultiLayerCausalLM) -> None:
    module = make_module(target)
    optimizer = module._optimizer(list(module.draft.named_parameters()), lr=module.lr)
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert len(trained) == len({id(weight) for weight in trained}) == len(list(module.draft.parameters()))
    (group,) = [group for group in optimizer.param_groups if any(w is module.draft.heads()[0] for w in group["params"])]
    assert group["lr"] == pytest.approx(0.3 * module.lr)


class Recorder(DummyLogger):
    """Keeps the training loss of every row."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "train/loss" in metrics:
            self.losses.append(metrics["train/loss"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_it_learns_in_both_precisions(tiny_llama: Any, precision: Any, tmp_path: Path) -> None:
    target = HFTarget(tiny_llama(vocab_size=VOCABULARY, initializer_range=0.2).bfloat16(), "tiny")
    module = make_module(target)
    source = Features(target, make_sequences(14, 11, 9, 12), ())
    recorder = Recorder()
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, precision=precision, gradient_clip_val=0.5, log_every_n_steps=1,
        num_sanity_val_steps=0, logger=recorder, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, datamodule=DraftDataModule(source, source, tokens_per_batch=24, seed=0, epochs=1, max_steps=40))
    assert all(math.isfinite(loss) for loss in recorder.losses)
    assert sum(recorder.losses[-4:]) < 0.5 * sum(recorder.losses[:4])
    assert {weight.dtype for weight in module.draft.parameters()} == {torch.float32}
