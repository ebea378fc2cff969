"""Block drafts learn what they decode: the blocks that are drawn, what each sees, the loss on its tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from data.batch import Batch, Sequences
from data.features import Features
from spec_decode.drafters.block import BlockConfig, BlockDraft
from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.errors import DraftwrightError
from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import chain
from train.block import BlockModule, draw_blocks
from train.dspark import DSparkModule
from train.losses import chunked_head_loss, kl
from train.metrics import UnrollMetrics

VOCAB, STEPS, TAPS = 60, 3, (2, 5)
IDS = torch.arange(0, VOCAB, 3)  # the draft vocabulary
LENGTHS = [9, 12, 7]
VARIANTS: dict[str, tuple[type[BlockModule], type[BlockDraft], type[BlockConfig], dict[str, Any], dict[str, Any]]] = {
    "dflash": (BlockModule, BlockDraft, BlockConfig, {}, {}),
    "causal": (BlockModule, BlockDraft, BlockConfig, {"causal": True, "mask_token": 4}, {}),
    "shifted": (BlockModule, BlockDraft, BlockConfig, {"shifted": True}, {}),
    "dspark": (DSparkModule, DSparkDraft, DSparkConfig, {"markov_rank": 8}, {}),
}

every_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(VOCAB, hidden_size=32, num_heads=4, num_kv_heads=2)


def make_module(name: str, target: MultiLayerCausalLM, **changes: Any) -> Any:
    """A module in fp64 and evaluation mode, every weight of its draft moved from where it starts."""
    kind, draft_kind, config, options, training = VARIANTS[name]
    torch.manual_seed(1)
    sizes = {"draft_vocab_size": len(IDS), "num_drafts": STEPS, "num_layers": 2, "target_layers": TAPS}
    draft = draft_kind(config.for_target(target.spec, **sizes | options)).double()
    draft.set_vocabulary(IDS)
    draft.init_head(target.head_weight())
    draft.bind(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fixed: dict[str, Any] = {"steps": STEPS, "decay": 0.8, "loss": "kl", "anchors": 100}
    unused: dict[str, Any] = {"lr": 0.0, "optimizer": None, "schedule": None}
    return kind(draft, target, **fixed | unused | training | changes).eval()


@pytest.fixture(scope="module")
def source(target: MultiLayerCausalLM) -> Features:
    """Three documents of random tokens; the first three of each are the prompt."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator, dtype=torch.int32)
    masks = torch.cat([torch.arange(length) >= 3 for length in LENGTHS])
    return Features(target, Sequences(ids, masks, torch.tensor([0, *LENGTHS]).cumsum(0)), TAPS)


def log_q(module: Any, states: Tensor) -> Tensor:
    """[K, S, H] -> log-probabilities [K, S, V_draft]."""
    return F.linear(states, module.draft.heads()[0]).log_softmax(-1)


def forced_chain(module: Any, batch: Batch, row: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Log-probabilities [K, V_draft] that decoding computes behind x[row + 1] while the true tokens are drafted."""
    start = int(batch.offsets[batch.offsets <= row][-1])
    ids = batch.ids[start : row + 1]
    draft, found = module.draft, []

    def grow(root_logp: Tensor, step: Any, *_: Any, **__: Any) -> None:
        found.append(root_logp)
        for depth in range(1, module.steps):
            found.append(step(batch.ids[row + 1 + depth][None], torch.tensor([depth - 2]))[0])

    monkeypatch.setattr(import_module(type(draft).__module__), "grow", grow)
    with torch.inference_mode():
        state = draft.start(module.target.forward(ids[None], taps=draft.taps), ids)
        draft.propose(state, int(batch.ids[row + 1]), chain(STEPS))
    return torch.stack(found)


@every_variant
def test_training_and_decoding_compute_the_same_chain(
    name: str, target: MultiLayerCausalLM, source: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch = make_module(name, target), source.batch([2, 1, 0])
    rows = torch.tensor([0, 3, 7, 8, 14, 19, 23])  # of three documents that start at 0, 7 and 19
    with torch.inference_mode():
        trained = log_q(module, module.unroll(batch, rows))
    assert trained.shape == (STEPS, len(rows), len(IDS))
    for place, row in enumerate(rows.tolist()):
        decoded = forced_chain(module, batch, row, monkeypatch)
        torch.testing.assert_close(decoded.double(), trained[:, place], rtol=0, atol=1e-5)
    assert not torch.allclose(trained[0], trained[1], atol=0.01)


# --- masks -----------------------------------------------------------------------------------------------------------

# Two documents of four tokens; blocks behind the rows 0, 2 and 5, so anchors 1, 3 and 6. Columns: target states.
SEEN = [
    [1, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 1, 1, 0, 0],
]
# Rows: slots of a block; columns: the slots whose input reaches them.
WITHIN = {False: [[1, 1, 1, 1]] * 4, True: [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]}


@pytest.mark.parametrize("name", ["dflash", "causal"])
def test_masks_by_hand(
    name: str, target: MultiLayerCausalLM, source: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, whole = make_module(name, target), source.batch([0])
    batch = Batch(
        ids=whole.ids[:8],
        loss_mask=torch.ones(8, dtype=torch.bool),
        offsets=torch.tensor([0, 4, 8]),
        features=whole.features[:8].clone().requires_grad_(),
        last_hidden=whole.last_hidden[:8],
    )
    inputs = module.draft.inputs(batch.ids[[1, 3, 6]]).detach().requires_grad_()
    monkeypatch.setattr(module.draft, "inputs", lambda _anchors: inputs)
    monkeypatch.setattr(module.draft, "outputs", lambda x: x)  # of every slot
    slots = module.unroll(batch, torch.tensor([0, 2, 5]))  # [B, blocks, H]
    for block in range(3):
        for slot in range(4):
            of_features, of_inputs = torch.autograd.grad(
                slots[slot, block].sum(), (batch.features, inputs), retain_graph=True
            )
            assert of_features.any(dim=1).int().tolist() == SEEN[block]
            reached = of_inputs.any(dim=2).int()
            assert reached[block].tolist() == WITHIN[module.draft.config.causal][slot]
            assert int(reached.sum()) == int(reached[block].sum())


@every_variant
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]], ids=str)
def test_packed_documents_do_not_see_each_other(
    name: str, order: list[int], target: MultiLayerCausalLM, source: Features
) -> None:
    module = make_module(name, target)
    with torch.inference_mode():
        together = module._unrolled(source.batch(order))
        first = 0
        for document in order:
            alone = module._unrolled(source.batch([document]))
            columns = slice(first, first := first + len(alone.tokens))
            valid = alone.alignment.valid
            assert torch.equal(together.alignment.valid[:, columns], valid)
            assert torch.equal(together.tokens[columns], alone.tokens)
            left, right = together.states[:, columns][valid], alone.states[valid]
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)
    assert first == len(together.tokens)


# --- anchors ---------------------------------------------------------------------------------------------------------


def packed(mask: str) -> Batch:
    """Documents apart by a bar, their supervised tokens as 1: "0011|011"."""
    documents = mask.split("|")
    flags = torch.tensor([flag == "1" for flag in mask.replace("|", "")])
    offsets = torch.tensor([0, *map(len, documents)]).cumsum(0)
    nothing = torch.zeros(len(flags), 0)
    return Batch(torch.arange(len(flags)), flags, offsets, nothing, nothing)


def test_blocks_by_hand() -> None:
    """Token 0 of a document is no anchor, having no context; an anchor and the token after it are supervised."""
    drawn = draw_blocks(packed("0011101|110|0110111"), 100, 3)
    #     anchors                2  3  11 14 15
    assert (drawn.rows + 1).tolist() == [2, 3, 11, 14, 15]
    assert drawn.targets.tolist() == [[3, 4, 12, 15, 16], [4, 5, 13, 16, 16], [5, 6, 14, 16, 16]]
    assert drawn.valid.int().tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert drawn.index.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_anchors_are_drawn_anew_from_torchs_random_state() -> None:
    batch = packed("0" + 30 * "1" + "|0" + 20 * "1")
    torch.manual_seed(0)
    first, second = draw_blocks(batch, 8, 3), draw_blocks(batch, 8, 3)
    torch.manual_seed(0)
    again = draw_blocks(batch, 8, 3)
    assert torch.equal(first.rows, again.rows)
    assert not torch.equal(first.rows, second.rows)
    assert first.rows.tolist() == sorted(set(first.rows.tolist()))
    assert len(first.rows) == 8
    seen = torch.zeros(52)
    for _ in range(400):
        seen[draw_blocks(batch, 8, 3).rows + 1] += 1
    anchors = torch.tensor([*range(1, 30), *range(32, 51)])
    assert seen.sum() == seen[anchors].sum()  # nothing else
    assert 30 < seen[anchors].min() < seen[anchors].max() < 110  # 400 * 8 / 48 = 67 each


def test_validation_draws_nothing_and_measures_every_row(target: MultiLayerCausalLM, source: Features) -> None:
    module, batch = make_module("dflash", target, anchors=2), source.batch([0, 1, 2])
    state = torch.get_rng_state()
    unrolled = module._unrolled(batch)
    assert torch.equal(state, torch.get_rng_state())
    assert unrolled.states.shape[:2] == (STEPS, int(batch.loss_mask.sum()))
    assert module.train()._unrolled(batch).states.shape[:2] == (STEPS, 2)
    assert not torch.equal(state, torch.get_rng_state())


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["data", "target"])
@pytest.mark.parametrize("name", ["dflash", "causal", "shifted"])
def test_the_loss_by_hand(name: str, labels: str, target: MultiLayerCausalLM, source: Features) -> None:
    """Token by token from the definition; unknown tokens are no labels."""
    loss_name = "hard_cross_entropy" if labels == "data" else "soft_cross_entropy"
    module, batch = make_module(name, target, loss=loss_name, labels=labels).train(), source.batch([1, 0])
    loss, steps = module._loss(module._unrolled(batch))
    with torch.inference_mode():
        q = log_q(module, module.unroll(batch, torch.arange(21)))
        p = target.head(batch.last_hidden)[:, IDS].softmax(-1)
        wanted = []
        for step in range(STEPS):
            values = []
            for start, stop in ((0, 12), (12, 21)):
                for anchor in range(start + 3, stop - 1 - step):
                    token, row = anchor + 1 + step, q[step, anchor - 1]
                    if labels == "target":
                        values.append(-(p[token - 1] * row).sum())
                    elif int(batch.ids[token]) % 3 == 0:
                        values.append(-row[int(batch.ids[token]) // 3])
            wanted.append(torch.stack(values).mean())
    torch.testing.assert_close(steps, torch.stack(wanted).float(), rtol=1e-5, atol=0)
    assert loss.item() == pytest.approx(sum(0.8**step * float(value) for step, value in enumerate(wanted)), rel=1e-5)


def test_the_loss_of_dspark_by_hand(target: MultiLayerCausalLM, source: Features) -> None:
    """0.1 cross-entropy + 0.9 |p - q|_1 + the confidence's cross-entropy, token by token."""
    parts = {"soft_cross_entropy": 0.1, "total_variation": 1.8}
    module, batch = make_module("dspark", target, loss=parts).train(), source.batch([1])
    module.draft.config = replace(module.draft.config, confidence_bias=0.4)  # of an imported draft
    loss, steps = module._loss(module._unrolled(batch))
    draft, wanted = module.draft, []
    with torch.inference_mode():
        states = module.unroll(batch, torch.arange(12))
        p = target.head(batch.last_hidden)[:, IDS].softmax(-1)
        for step in range(STEPS):
            values = []
            for anchor in range(3, 11 - step):
                h, before = states[step, anchor - 1, :32], batch.ids[anchor + step]
                markov = draft.markov_head.embed_tokens.weight[before]
                q = (draft.lm_head.weight @ h + draft.markov_head.lm_head.weight @ markov).softmax(-1)
                confidence = torch.sigmoid(draft.confidence @ torch.cat((h, markov)) + 0.4)
                truth, distance = p[anchor + step], (p[anchor + step] - q).abs().sum()
                accepted = 1 - distance / 2
                confused = -accepted * confidence.log() - (1 - accepted) * (1 - confidence).log()
                values.append(-0.1 * (truth * q.log()).sum() + 0.9 * distance + confused)
            wanted.append(torch.stack(values).mean())
    torch.testing.assert_close(steps, torch.stack(wanted).float(), rtol=1e-5, atol=0)
    assert loss.item() == pytest.approx(sum(0.8**step * float(value) for step, value in enumerate(wanted)), rel=1e-5)


def test_the_confidence_learns_the_probability_of_acceptance(target: MultiLayerCausalLM, source: Features) -> None:
    """Its label has no gradient: with the loss on tokens away, the head's own rows learn nothing."""
    module, batch = make_module("dspark", target, loss={"kl": 0.0}).train(), source.batch([1])
    loss, _ = module._loss(module._unrolled(batch))
    loss.backward()
    assert not module.draft.markov_head.lm_head.weight.grad.any()
    assert module.draft.confidence.grad.all()


def test_decay_of_zero_leaves_the_first_token(target: MultiLayerCausalLM, source: Features) -> None:
    module, first = (make_module("dflash", target, decay=decay).train() for decay in (0.8, 0.0))
    _, steps = module._loss(module._unrolled(source.batch([1])))
    loss, alone = first._loss(first._unrolled(source.batch([1])))
    assert loss.item() == pytest.approx(steps[0].item(), rel=1e-6)
    assert len(alone) == 1


@every_variant
def test_gradients_reach_every_weight_of_the_draft_and_nothing_else(
    name: str, target: MultiLayerCausalLM, source: Features
) -> None:
    module, batch = make_module(name, target).train(), source.batch([0, 1, 2])
    frozen = {key: value.clone() for key, value in [*target.model.named_parameters(), *module.named_buffers()]}
    loss, steps = module._loss(module._unrolled(batch))
    assert not steps.requires_grad
    loss.backward()
    for key, parameter in module.draft.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        rows = parameter.grad != 0 if parameter.ndim == 1 else (parameter.grad != 0).any(dim=1)
        wanted = torch.ones_like(rows)
        if "embed_tokens" in key:  # tokens that nothing follows learn nothing
            wanted = torch.isin(torch.arange(VOCAB), _previous(batch))
        assert torch.equal(rows, wanted), key
    assert not any(value.requires_grad or value.grad is not None for value in target.model.parameters())
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    for key, value in [*target.model.named_parameters(), *module.named_buffers()]:
        assert torch.equal(value, frozen[key]), key


def _previous(batch: Batch) -> Tensor:
    """Tokens that stand before a token that some block learns."""
    drawn = draw_blocks(batch, 100, STEPS)
    return batch.ids[drawn.targets[drawn.valid] - 1]


@every_variant
def test_a_batch_without_anchors_teaches_nothing(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    module, batch = make_module(name, target).train(), source.batch([0])
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    unrolled = module._unrolled(batch)
    loss, steps = module._loss(unrolled)
    assert loss.item() == 0
    assert not steps.any()
    loss.backward()
    module._measure(unrolled, module.train_metrics)
    assert module.train_metrics.compute()["tau"] == 1


# --- what is shared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_labels", [False, True])
def test_the_chunked_loss_of_steps_that_predict_other_tokens(
    with_labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.losses.CHUNK_ROWS", 7)
    monkeypatch.setattr("train.losses.GROUP_ROWS", 13)
    torch.manual_seed(0)
    states = torch.randn(3, 10, 6, dtype=torch.float64, requires_grad=True)
    head, target_head = torch.randn(11, 6, dtype=torch.float64, requires_grad=True), torch.randn(11, 5).double()
    weights, target_states = torch.rand(3, 10).double(), torch.randn(3, 10, 5).double()
    labels = torch.randint(11, (3, 10)) if with_labels else None
    total, _ = chunked_head_loss(states, [head], weights, target_states, target_head, kl, labels)
    p = (target_states @ target_head.T).softmax(-1) if labels is None else F.one_hot(labels, 11).double()
    wanted = (kl(states @ head.T, p) * weights).sum()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    for left, right in zip(*(torch.autograd.grad(each, (states, head)) for each in (total, wanted)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)


def test_metrics_of_steps_that_predict_other_tokens(target: MultiLayerCausalLM, source: Features) -> None:
    """All rows, laid out by block, give what the layout by token does."""
    module, batch = make_module("dflash", target, loss="kl"), source.batch([0, 1, 2])
    batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    found = []
    for unrolled in (module._unrolled(batch), module._drawn(batch)):
        near = unrolled.target_states + 0.2 * unrolled.states  # right now and then
        metrics = UnrollMetrics(STEPS)
        module._measure(replace(unrolled, states=near), metrics)
        found.append({name: value.item() for name, value in metrics.compute().items()})
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0]["tau"] > 1


def test_other_steps_than_drafts_are_refused(target: MultiLayerCausalLM) -> None:
    with pytest.raises(
        DraftwrightError, match=r"module\.steps=2 but one pass .* proposes 3 tokens: .* draft\.num_drafts"
    ):
        make_module("dflash", target, steps=2)
