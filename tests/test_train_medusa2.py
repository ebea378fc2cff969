"""Medusa-2: what it trains, that its checkpoints and its tuned target are whole, and what its report says."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from data.batch import Sequences
from data.features import NoFeatures
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.target_hf import HFTarget
from train.medusa2 import Medusa2Module
from train.optim import build_optimizer

VOCABULARY, DRAFT_VOCABULARY = 50, 40


def make_module(target: HFTarget) -> Medusa2Module:
    torch.manual_seed(1)
    draft = MedusaDraftModel(MedusaConfig.for_target(target.spec, num_heads=2, draft_vocab_size=DRAFT_VOCABULARY))
    draft.set_vocabulary(torch.arange(5, 5 + DRAFT_VOCABULARY))
    draft.init_head(target.head_weight())
    draft.bind(target)
    return Medusa2Module(
        draft, target, steps=2, decay=0.8, loss="hard_cross_entropy", labels="data", lr=1e-2,
        optimizer=partial(build_optimizer, name="adamw"), schedule=lambda optimizer, **_: None,
        medusa_weight=0.2, lora_rank=4, lora_lr=1e-3,
    )  # fmt: skip


@pytest.fixture
def target(tiny_llama) -> HFTarget:
    return HFTarget(tiny_llama(), "tiny")


@pytest.fixture
def batch():
    ids = torch.randint(VOCABULARY, (22,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    mask = torch.cat((torch.arange(9) >= 3, torch.arange(13) >= 4))
    return NoFeatures(Sequences(ids, mask, torch.tensor([0, 9, 22]))).batch([0, 1])


def test_the_loss_is_that_of_both_papers_terms(target, batch) -> None:
    module = make_module(target)
    loss, _ = module._loss(module._unrolled(batch))
    language, heads = [], [[], []]
    for start, stop, first in ((0, 9, 3), (9, 22, 4)):
        ids = batch.ids[start:stop]
        hidden = target.forward(ids[None], last_hidden=True).last_hidden[0]
        for at in range(first, stop - start):
            language.append(F.cross_entropy(target.head(hidden[at - 1]), ids[at]))
            for head in range(2):
                if at - 2 - head >= 0 and 5 <= ids[at] < 5 + DRAFT_VOCABULARY:
                    heads[head].append(F.cross_entropy(module.draft(hidden[at - 2 - head])[head], ids[at] - 5))
    means = [torch.stack(values).mean() for values in (language, *heads)]
    assert loss.item() == pytest.approx((means[0] + 0.2 * (means[1] + 0.8 * means[2])).item(), rel=1e-5)


def test_heads_and_adapters_learn_at_their_own_rates_and_nothing_else_does(target, batch, monkeypatch) -> None:
    module = make_module(target)
    before = {name: weight.detach().clone() for name, weight in target.model.named_parameters()}
    monkeypatch.setattr(Medusa2Module, "trainer", type("T", (), {"estimated_stepping_batches": 3}))
    optimizer = module.configure_optimizers()["optimizer"]
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [1e-3, 1e-2]
    for _ in range(2):  # LoRA's B is zero at first, so A has no gradient in the first step
        loss, _ = module._loss(module._unrolled(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, weight in target.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert len(changed) == 2 * 7 * 8  # A and B of seven linear layers in each of eight


def test_a_checkpoint_holds_the_adapters_but_not_the_target(target, tiny_llama) -> None:
    module = make_module(target)
    state = module.state_dict()
    assert sum(name.startswith("adapters.") for name in state) == 2 * 7 * 8
    assert not any("embed_tokens" in name for name in state)
    with torch.no_grad():
        for weight in module.adapters:
            weight.add_(1)
    other = make_module(HFTarget(tiny_llama(), "tiny"))
    other.load_state_dict(module.state_dict())
    ids = torch.arange(6)[None]
    torch.testing.assert_close(
        other.target.forward(ids, last_hidden=True).last_hidden, target.forward(ids, last_hidden=True).last_hidden
    )


def test_the_tuned_target_is_written_whole(target, tmp_path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    module = make_module(target)
    with torch.no_grad():
        for weight in module.adapters:
            weight.add_(0.05)
    ids = torch.arange(6)[None]
    wanted = target.forward(ids, last_hidden=True).last_hidden
    folder = module.export_target(tmp_path / "tuned", Tokenizer())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not any("lora" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(HFTarget(model).forward(ids, last_hidden=True).last_hidden, wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned"]
    assert (folder / "tokenizer.json").exists()
