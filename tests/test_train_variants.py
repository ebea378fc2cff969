"""Every variant learns what it decodes, from its own document, with all its weights and no others."""

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
from spec_decode.drafter import VocabularyDrafter
from spec_decode.drafters.eagle import EagleConfig, EagleDraft
from spec_decode.drafters.hydra import HydraConfig, HydraDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.drafters.mtp import MtpConfig, MtpDraft
from spec_decode.errors import DraftwrightError
from spec_decode.feature_drafter import FeatureDrafter
from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import chain
from train import eagle
from train.eagle import EagleModule
from train.eagle3 import Eagle3Module
from train.hydra import HydraModule
from train.losses import soft_cross_entropy
from train.medusa import MedusaModule
from train.module import DraftModule

VOCAB, STEPS = 60, 3
IDS = torch.arange(0, VOCAB, 3)  # the draft vocabulary
LENGTHS = [9, 12, 7]
EAGLE = {"regression": 1.0, "noise": 0.2}
VARIANTS: dict[str, tuple[type[DraftModule], type[VocabularyDrafter], Any, dict[str, Any]]] = {
    "eagle": (EagleModule, EagleDraft, EagleConfig, EAGLE | {"steps": 1, "loss": {"soft_cross_entropy": 0.1}}),
    "hass": (EagleModule, EagleDraft, EagleConfig, EAGLE | {"loss": {"kl": 0.1, "top_k_cross_entropy": 1.0}}),
    "mtp": (Eagle3Module, MtpDraft, MtpConfig, {}),
    "hydra": (HydraModule, HydraDraft, HydraConfig, {}),
    "medusa": (MedusaModule, MedusaDraftModel, MedusaConfig, {}),
}

every_variant = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(VOCAB, hidden_size=32, num_heads=4, num_kv_heads=2)


def make_module(name: str, target: MultiLayerCausalLM, **changes: Any) -> Any:
    """A module in fp64 and evaluation mode, every weight of its draft moved from where it starts."""
    kind, draft_kind, config, options = VARIANTS[name]
    torch.manual_seed(1)
    heads = {} if issubclass(draft_kind, FeatureDrafter) else {"num_heads": STEPS}
    draft = draft_kind(config.for_target(target.spec, draft_vocab_size=len(IDS), **heads)).double()
    draft.set_vocabulary(IDS)
    draft.init_head(target.head_weight())
    draft.bind(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fixed: dict[str, Any] = {"steps": STEPS, "decay": 0.8, "loss": soft_cross_entropy}
    unused: dict[str, Any] = {"lr": 0.0, "optimizer": None, "schedule": None}
    return kind(draft, target, **fixed | unused | options | changes).eval()


@pytest.fixture(scope="module")
def source(target: MultiLayerCausalLM) -> Features:
    """Three documents of random tokens; the first three of each are the prompt."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator, dtype=torch.int32)
    masks = torch.cat([torch.arange(length) >= 3 for length in LENGTHS])
    return Features(target, Sequences(ids, masks, torch.tensor([0, *LENGTHS]).cumsum(0)), ())


def log_q(module: Any, states: Tensor) -> Tensor:
    """[K, S, H] -> log-probabilities [K, S, V_draft]."""
    heads = module.draft.heads() * (len(states) if len(module.draft.heads()) == 1 else 1)
    return torch.stack([F.linear(state, head).log_softmax(-1) for state, head in zip(states, heads, strict=True)])


def forced_chain(module: Any, batch: Batch, row: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Log-probabilities [K, V_draft] that decoding computes behind x[row + 1] while the true tokens are drafted."""
    start = int(batch.offsets[batch.offsets <= row][-1])
    ids = batch.ids[start : row + 1]
    draft, found = module.draft, []

    def grow(root_logp: Tensor, step: Any, *_: Any, **__: Any) -> None:
        found.append(root_logp)
        for depth in range(1, module.steps):
            found.append(step(batch.ids[row + 1 + depth][None], torch.tensor([depth - 2]))[0])

    owner = "spec_decode.feature_drafter" if isinstance(draft, FeatureDrafter) else type(draft).__module__
    monkeypatch.setattr(import_module(owner), "grow", grow)
    with torch.inference_mode():
        state = draft.start(module.target.forward(ids[None], last_hidden=True), ids)
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
    assert trained.shape == (module.steps, len(rows), len(IDS))
    for place, row in enumerate(rows.tolist()):
        decoded = forced_chain(module, batch, row, monkeypatch)
        torch.testing.assert_close(decoded.double(), trained[:, place], rtol=0, atol=1e-5)
    if module.steps > 1:
        assert not torch.allclose(trained[0], trained[1], atol=0.01)


def norm(weights: Any, x: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights.weight


def by_hand(name: str, draft: Any, embeds: Tensor, states: Tensor, steps: int) -> Tensor:
    """What the head reads at the last of T rows in each step, [K, H], straight from the papers' formulas.

    embeds [T + K - 1, H]: those of x_1, x_2, ...; states [T, H]: the target's, f_0, f_1, ... No gradient flows through
    the states that EAGLE's steps start from.
    """
    layer, eps, heads = draft.midlayer, draft.config.rms_norm_eps, (draft.config.num_heads, draft.config.num_kv_heads)
    attention, keys, values, read = layer.self_attn, [], [], []
    rows, state = len(states), states[0]
    for row in range(rows + steps - 1):
        embed, state = embeds[row], states[row] if row < rows else state
        if name == "eagle":
            state = state.detach()
            residual = x = torch.cat((embed, state)) @ layer.fc.weight.T + layer.fc.bias
        else:
            both = norm(layer.token_layernorm, embed, eps), norm(layer.hidden_layernorm, state, eps)
            residual = torch.cat(both) @ layer.input_proj.weight.T
            x = norm(layer.input_layernorm, residual, eps)
        place = torch.tensor([row])  # the row t of step 0; t + k in step k
        q, k, v = (each.weight @ x for each in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = (attention.rope.rotate(each.view(1, -1, 8), place)[0] for each in (q, k))
        keys.append(k.repeat_interleave(heads[0] // heads[1], 0))
        values.append(v.view(-1, 8).repeat_interleave(heads[0] // heads[1], 0))
        scores = (q * torch.stack(keys)).sum(-1) / 8**0.5  # [seen, heads]
        attended = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0).flatten()
        hidden = residual + attention.o_proj.weight @ attended
        normed = norm(layer.post_attention_layernorm, hidden, eps)
        gated = F.silu(layer.mlp.gate_proj.weight @ normed) * (layer.mlp.up_proj.weight @ normed)
        hidden = hidden + layer.mlp.down_proj.weight @ gated
        state = hidden if name == "eagle" else norm(draft.final_layernorm, hidden, eps)
        if row >= rows - 1:
            read.append(state)
    return torch.stack(read)


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_the_layer_by_hand(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    module, batch = make_module(name, target, steps=3), source.batch([1])
    with torch.inference_mode():
        found = module.unroll(batch, torch.tensor([0, 4, 8]))
        for place, row in enumerate((0, 4, 8)):
            embeds = target.embed(batch.ids[1 : row + 4])
            wanted = by_hand(name, module.draft, embeds, batch.last_hidden[: row + 1], 3)
            torch.testing.assert_close(found[:, place], wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_the_gradients_by_hand(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    module, batch = make_module(name, target, steps=3), source.batch([1])
    weights = torch.rand(3, 32, dtype=torch.float64)
    found = module.unroll(batch, torch.tensor([5]))[:, 0]
    wanted = by_hand(name, module.draft, target.embed(batch.ids[1:9]), batch.last_hidden[:6], 3)
    parameters = list(module.draft.parameters())
    ours, theirs = (torch.autograd.grad((states * weights).sum(), parameters) for states in (found, wanted))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["hydra", "medusa"])
def test_the_heads_by_hand(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    module, batch = make_module(name, target), source.batch([1])
    rows = torch.tensor([0, 5, 8])
    with torch.inference_mode():
        found = module.unroll(batch, rows)
        hidden = batch.last_hidden[rows]
        for step in range(STEPS):
            if name == "medusa":
                linear = module.draft.medusa[step].blocks[0].linear
                wanted = hidden + F.silu(hidden @ linear.weight.T + linear.bias)
            else:
                head = module.draft.hydra[step]
                inputs = torch.cat((hidden, *(target.embed(batch.ids[rows + 1 + i]) for i in range(step + 1))), dim=-1)
                wanted = inputs @ head.residual.weight.T
                wanted = wanted + F.silu(inputs @ head.linear.weight.T + head.linear.bias)
            torch.testing.assert_close(found[step], wanted, rtol=0, atol=1e-12)


@every_variant
def test_gradients_reach_every_weight_of_the_draft_and_nothing_else(
    name: str, target: MultiLayerCausalLM, source: Features
) -> None:
    module = make_module(name, target).train()
    frozen = {key: value.clone() for key, value in [*target.model.named_parameters(), *module.named_buffers()]}
    loss, steps = module._loss(module._unrolled(source.batch([0, 1, 2])))
    assert not steps.requires_grad
    loss.backward()
    for key, parameter in module.draft.named_parameters():
        assert parameter.requires_grad, key
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        if parameter.ndim == 2:
            assert (parameter.grad != 0).any(dim=1).all(), key
    assert not any(value.requires_grad or value.grad is not None for value in target.model.parameters())
    shared = [head for head in module.draft.heads() if not isinstance(head, torch.nn.Parameter)]
    assert len(shared) == (name in ("eagle", "hass", "mtp"))
    assert not any(head.requires_grad or head.grad is not None for head in shared)
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    for key, value in [*target.model.named_parameters(), *module.named_buffers()]:
        assert torch.equal(value, frozen[key]), key


@pytest.mark.parametrize("name", ["hass", "mtp", "hydra", "medusa"])
def test_what_one_step_teaches(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    """Independent heads learn from their own step alone; one module learns from all of them."""
    module = make_module(name, target)
    unrolled = module._unrolled(source.batch([1]))
    states = unrolled.states[1]
    states.sum().backward()
    weights = dict(module.draft.named_parameters())
    learning = {key for key, weight in weights.items() if weight.grad is not None and weight.grad.any()}
    if isinstance(module.draft, FeatureDrafter):
        assert learning == weights.keys()
    else:
        assert learning == {key for key in weights if key.split(".")[1] == "1" and "lm_head" not in key}


@every_variant
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]], ids=str)
def test_packed_documents_do_not_see_each_other(
    name: str, order: list[int], target: MultiLayerCausalLM, source: Features
) -> None:
    """Every state that a loss reads is that of its document alone, to the last bit of its supervised tokens."""
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
            torch.testing.assert_close(together.target_states[columns], alone.target_states, rtol=0, atol=1e-12)
    assert first == len(together.tokens)


@pytest.mark.parametrize("name", ["eagle", "hass"])
def test_the_regression_by_hand(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    batch = source.batch([1, 0])
    modules = [make_module(name, target, regression=weight) for weight in (0.0, 0.7)]
    with torch.inference_mode():
        states = modules[0].unroll(batch, torch.arange(len(batch.ids)))
    wanted = torch.zeros(())
    for step in range(modules[0].steps):
        distances = []
        for start, stop in ((0, 12), (12, 21)):
            for token in range(start + 3, stop):  # the supervised ones
                row = token - 2 - step
                if row >= start:
                    gap = (states[step, row] - batch.last_hidden[token - 1]).abs()
                    distances.append(torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean())
        wanted = wanted + 0.8**step * torch.stack(distances).mean()
    without, both = (module._loss(module._unrolled(batch))[0].item() for module in modules)
    assert without > 0
    assert both - without == pytest.approx(0.7 * float(wanted), rel=1e-5)


@pytest.mark.parametrize("name", ["eagle", "hass"])
def test_noise_in_training_alone_its_width_by_the_length_of_the_document(
    name: str, target: MultiLayerCausalLM, source: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batch, given = make_module(name, target), source.batch([0, 1, 2]), []
    monkeypatch.setattr(
        eagle, "training_time_test", lambda _draft, _target, _batch, states, *_, **__: given.append(states)
    )

    def noise() -> Tensor:
        module.unroll(batch, torch.arange(3))
        return given.pop() - batch.last_hidden

    assert not noise().any()
    module.train()
    torch.manual_seed(0)
    found = torch.stack([noise() for _ in range(50)])
    torch.manual_seed(0)
    assert torch.equal(noise(), found[0])
    assert not torch.equal(found[0], found[1])
    for length, part in zip(LENGTHS, found.split(LENGTHS, dim=1), strict=True):
        width = 0.2 * 512 / length
        assert float(part.min()) == pytest.approx(-width / 2, rel=0.01)
        assert float(part.max()) == pytest.approx(width / 2, rel=0.01)
        assert float(part.std()) == pytest.approx(width / 12**0.5, rel=0.02)
    module.noise = 0.0
    assert not noise().any()


def test_noise_does_not_touch_what_the_regression_wants(target: MultiLayerCausalLM, source: Features) -> None:
    module, batch = make_module("eagle", target).train(), source.batch([1])
    assert torch.equal(module._unrolled(batch).target_states, batch.last_hidden[2:-1])


@every_variant
def test_the_loss_by_hand(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    """Straight from the definition: true tokens, the target's distribution over the draft vocabulary, decay^k."""
    module, batch = make_module(name, target, loss="soft_cross_entropy", decay=0.5), source.batch([1, 0])
    if name in ("eagle", "hass"):
        module.regression = 0.0
    with torch.inference_mode():
        q = log_q(module, module.unroll(batch, torch.arange(21)))
        p = target.head(batch.last_hidden)[:, IDS].softmax(-1)
        wanted = []
        for step in range(module.steps):
            first = max(3, 2 + step)  # of the supervised tokens of each document that a row predicts
            tokens = [*range(first, 12), *range(12 + first, 21)]
            wanted.append(torch.stack([-(p[token - 1] * q[step, token - 2 - step]).sum() for token in tokens]).mean())
    loss, steps = module._loss(module._unrolled(batch))
    torch.testing.assert_close(steps, torch.stack(wanted).float(), rtol=1e-5, atol=0)
    assert loss.item() == pytest.approx(sum(0.5**step * float(value) for step, value in enumerate(wanted)), rel=1e-5)


@every_variant
def test_labels_of_the_data_are_torchs_cross_entropy_without_unknown_tokens(
    name: str, target: MultiLayerCausalLM, source: Features
) -> None:
    module = make_module(name, target, loss="hard_cross_entropy", labels="data", decay=0.5)
    if name in ("eagle", "hass"):
        module.regression = 0.0
    batch = source.batch([2, 1])
    unrolled = module._unrolled(batch)
    draft_id = {int(token): place for place, token in enumerate(IDS)}
    known = torch.tensor([int(token) in draft_id for token in unrolled.tokens])
    labels = torch.tensor([draft_id.get(int(token), 0) for token in unrolled.tokens])
    assert 0 < known.sum() < len(known)
    values = log_q(module, unrolled.states)
    steps = []
    for step in range(module.steps):
        counts = unrolled.alignment.valid[step] & known
        steps.append(F.nll_loss(values[step, counts], labels[counts]))
    loss, found = module._loss(unrolled)
    torch.testing.assert_close(found, torch.stack(steps).detach().float(), rtol=1e-5, atol=0)
    wanted = torch.stack([0.5**step * value for step, value in enumerate(steps)]).sum()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    parameters = list(module.draft.parameters())
    ours, theirs = (torch.autograd.grad(each, parameters, retain_graph=True) for each in (loss, wanted))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8)


@every_variant
def test_labels_of_the_data_where_the_draft_knows_none_of_them(
    name: str, target: MultiLayerCausalLM, source: Features
) -> None:
    module = make_module(name, target, loss="hard_cross_entropy", labels="data")
    batch = source.batch([0])
    batch = replace(batch, ids=torch.where(torch.isin(batch.ids, IDS), batch.ids + 1, batch.ids))
    loss, steps = module._loss(module._unrolled(batch))
    assert not steps.any()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.draft.parameters() if parameter.grad is not None)


@every_variant
def test_decay_of_one_weighs_all_steps_alike(name: str, target: MultiLayerCausalLM, source: Features) -> None:
    batch = source.batch([0, 1])
    results = []
    for decay in (1.0, 0.5, 0.0):
        module = make_module(name, target, loss="kl", decay=decay)
        if name in ("eagle", "hass"):
            module.regression = 0.0
        loss, steps = module._loss(module._unrolled(batch))
        results.append((loss.item(), steps.tolist()))
    (even, steps), (halved, _), (first, _) = results
    assert even == pytest.approx(sum(steps), rel=1e-6)
    assert halved == pytest.approx(sum(0.5**step * value for step, value in enumerate(steps)), rel=1e-6)
    assert first == pytest.approx(steps[0], rel=1e-6)
    assert min(steps) > 0


def test_labels_that_do_not_exist_are_named(target: MultiLayerCausalLM) -> None:
    with pytest.raises(DraftwrightError, match=r"module\.labels=answers is unknown; choose target or data"):
        make_module("medusa", target, labels="answers")


@pytest.mark.parametrize("name", ["hydra", "medusa"])
def test_other_steps_than_heads_are_refused(name: str, target: MultiLayerCausalLM) -> None:
    with pytest.raises(DraftwrightError, match=r"module\.steps=2 but the draft has 3 heads: .* draft\.num_heads"):
        make_module(name, target, steps=2)
