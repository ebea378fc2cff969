"""P-EAGLE: what it learns is what it decodes, what each depth sees, which depths are kept, plain decoding's output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from data.batch import Batch, Sequences
from data.features import Features
from spec_decode.decode import batch_decode, plain_decode, speculative_decode
from spec_decode.drafters import load_draft
from spec_decode.drafters.p_eagle import PEagleConfig, PEagleDraft
from spec_decode.errors import DraftwrightError
from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import DynamicTree, SparseTree, StaticTree, TreePlan
from train.p_eagle import PEagleModule, nested, run_depths

VOCAB, CONTEXT, STEPS, TAPS = 60, 48, 3, (2, 5)
IDS = torch.arange(0, VOCAB, 3)  # the draft vocabulary
LENGTHS = [9, 12, 7]
PROMPTS = [[5, 17, 3, 2, 28, 9], [3], [9] * (CONTEXT - 4), [7] * CONTEXT, list(range(20))]
PLANS = [
    StaticTree((1,) * 7),  # deeper than a pass
    StaticTree((3, 2, 2)),
    SparseTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0))),
    DynamicTree(5, 4, 14),
]


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(VOCAB, hidden_size=32, num_heads=4, num_kv_heads=2, max_positions=CONTEXT)


def make_draft(target: MultiLayerCausalLM, **changes: Any) -> PEagleDraft:
    """A random draft in fp64, near enough to the target to be right now and then."""
    torch.manual_seed(1)
    sizes = {"draft_vocab_size": len(IDS), "num_drafts": STEPS, "num_layers": 3, "target_layers": TAPS}
    draft = PEagleDraft(PEagleConfig.for_target(target.spec, **sizes | changes)).double()
    draft.set_vocabulary(IDS)
    draft.init_head(target.head_weight())
    draft.bind(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return draft


def make_module(target: MultiLayerCausalLM, mask_token: int | None = None, **changes: Any) -> PEagleModule:
    fixed: dict[str, Any] = {"steps": STEPS, "decay": 1.0, "loss": "kl", "keep": 0.6}
    unused: dict[str, Any] = {"lr": 0.0, "optimizer": None, "schedule": None}
    return PEagleModule(make_draft(target, mask_token=mask_token), target, **fixed | unused | changes).eval()


@pytest.fixture(scope="module")
def source(target: MultiLayerCausalLM) -> Features:
    """Three documents of random tokens; the first three of each are the prompt."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator, dtype=torch.int32)
    masks = torch.cat([torch.arange(length) >= 3 for length in LENGTHS])
    return Features(target, Sequences(ids, masks, torch.tensor([0, *LENGTHS]).cumsum(0)), TAPS)


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_greedy_output_is_plain_decodings_alone_and_in_a_batch(target: MultiLayerCausalLM, plan: TreePlan) -> None:
    draft = make_draft(target)
    together = batch_decode(target, draft, PROMPTS, tree=plan, max_new_tokens=14)
    for prompt, got in zip(PROMPTS, together, strict=True):
        alone = speculative_decode(target, draft, prompt, tree=plan, max_new_tokens=14)
        assert alone.tokens == plain_decode(target, prompt, max_new_tokens=14).tokens
        assert (got.tokens, got.accepted, got.offered) == (alone.tokens, alone.accepted, alone.offered)
    assert max(max(result.offered, default=0) for result in together) == STEPS


def test_state_after_any_path_is_that_of_a_fresh_start(target: MultiLayerCausalLM) -> None:
    draft, plan = make_draft(target), StaticTree((2, 2))

    def whole(ids: list[int]) -> Any:
        return draft.start(target.forward(torch.tensor([ids]), taps=TAPS), torch.tensor(ids))

    with torch.inference_mode():
        ids, root, state = [5, 17, 3], 8, whole([5, 17, 3])
        for path in ([0], [0, 2, 5], [0, 1]):  # nothing accepted, two nodes, one
            tree = draft.propose(state, root, plan)
            fresh = draft.propose(whole(ids), root, plan)
            assert torch.equal(tree.tokens, fresh.tokens)
            torch.testing.assert_close(tree.log_q, fresh.log_q, rtol=0, atol=1e-5)
            assert state.keys.shape[2] == len(ids)  # the masked rows' keys are gone
            rows = []  # what the target says of each node, one path at a time
            for node in range(len(tree)):
                seen = torch.tensor([ids + tree.tokens[tree.ancestor_mask()[node]].tolist()])
                rows.append(target.forward(seen, taps=TAPS).features[:, -1:])  # type: ignore[index]
            state = draft.commit(state, tree, torch.tensor(path), _Output(torch.cat(rows, dim=1)))  # type: ignore[arg-type]
            ids, root = ids + tree.tokens[path].tolist(), 11


class _Output:
    last_hidden = None

    def __init__(self, features: Tensor) -> None:
        self.features = features


def test_a_folder_gives_the_same_draft_back(target: MultiLayerCausalLM, tmp_path: Path) -> None:
    draft = make_draft(target, tokenizer="abc").float()
    draft.save_pretrained(tmp_path)
    loaded = load_draft(tmp_path)
    assert type(loaded) is PEagleDraft
    assert loaded.config == draft.config
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_drafts": 0}, "num_drafts must be at least 1, got 0"),
        ({"mask_token": VOCAB}, f"mask_token {VOCAB} is no token of the target: choose one from 0 to {VOCAB - 1}"),
        ({"norm_output": True}, "norm_output is for drafts that feed their output back, which P-EAGLE doesn't"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_that_cannot_be_are_refused(target: MultiLayerCausalLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftwrightError, match=message):
        PEagleConfig.for_target(target.spec, **changes)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_token", [None, 7])
def test_training_and_decoding_compute_the_same_states(
    target: MultiLayerCausalLM, source: Features, mask_token: int | None
) -> None:
    module, batch = make_module(target, mask_token), source.batch([2, 1, 0])
    rows = torch.tensor([0, 3, 5, 7, 8, 14, 17, 19, 23, 26])  # of three documents that start at 0, 7 and 19
    with torch.inference_mode():
        trained = module.unroll(batch, rows)
        for place, row in enumerate(rows.tolist()):
            ids = batch.ids[int(batch.offsets[batch.offsets <= row][-1]) : row + 1]
            state = module.draft.start(target.forward(ids[None], taps=TAPS), ids)
            decoded = module.draft.run_depths(state, int(batch.ids[row + 1]))
            torch.testing.assert_close(decoded, trained[:, place], rtol=0, atol=1e-9)
    assert not torch.allclose(trained[0], trained[1], atol=0.01)


@pytest.mark.parametrize("mask_token", [None, 7])
def test_the_first_depth_is_an_ordinary_causal_transformer(
    target: MultiLayerCausalLM, source: Features, mask_token: int | None
) -> None:
    """And later depths are the rows behind it, with the mask in place of what isn't known."""
    module, batch = make_module(target, mask_token), source.batch([1])
    draft = module.draft
    mask = draft.mask if mask_token is None else target.embed(torch.tensor(mask_token))
    with torch.inference_mode():
        found = module.unroll(batch, torch.tensor([8]))[:, 0]
        embeds = torch.cat((target.embed(batch.ids[1:10]), mask.expand(2, -1)))
        hidden = torch.cat((batch.features[:9], draft.mask_hidden.expand(2, -1))) @ draft.fc.weight.T
        positions, causal = torch.arange(11), torch.ones(11, 11).tril()
        for layer in draft.all_layers():
            residual, x = layer.inputs(embeds, hidden)
            query = layer.self_attn.query(x, positions)
            key, value = (each.repeat_interleave(2, dim=1) for each in layer.self_attn.key_value(x, positions))
            scores = torch.einsum("mhd,nhd->hmn", query, key) / 8**0.5
            share = scores.masked_fill(causal == 0, -torch.inf).softmax(-1)
            hidden = layer.outputs(residual, torch.einsum("hmn,nhd->mhd", share, value).flatten(1))
        torch.testing.assert_close(found, draft.norm(hidden[8:]), rtol=0, atol=1e-9)


# Two documents of four tokens; rows 0, 2 and 5. Columns: target states that reach any of their depths.
SEEN = [
    [1, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 1, 1, 0, 0],
]


def test_masks_by_hand(target: MultiLayerCausalLM, source: Features) -> None:
    module, whole = make_module(target), source.batch([0])
    batch = Batch(
        ids=whole.ids[:8],
        loss_mask=torch.ones(8, dtype=torch.bool),
        offsets=torch.tensor([0, 4, 8]),
        features=whole.features[:8].clone().requires_grad_(),
        last_hidden=whole.last_hidden[:8],
    )
    states = module.unroll(batch, torch.tensor([0, 2, 5]))
    for depth in range(STEPS):
        for place in range(3):
            (grad,) = torch.autograd.grad(states[depth, place].sum(), batch.features, retain_graph=True)
            assert grad.any(dim=1).int().tolist() == SEEN[place]


def test_depths_that_are_left_out_change_no_other(target: MultiLayerCausalLM, source: Features) -> None:
    module, batch, rows = make_module(target), source.batch([0, 1, 2]), torch.tensor([1, 4, 10, 11, 22])
    kept = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 0, 0, 1, 0]]).bool()
    with torch.inference_mode():
        whole, part = module.unroll(batch, rows), run_depths(module.draft, target, batch, rows, kept)
    torch.testing.assert_close(part[kept], whole[kept], rtol=0, atol=1e-12)
    assert not part[~kept].any()


def test_kept_depths_are_nested_and_drawn_from_torchs_random_state() -> None:
    torch.manual_seed(0)
    kept, other = nested(1000, 5, 0.5, torch.device("cpu")), nested(1000, 5, 0.5, torch.device("cpu"))
    assert kept.sum(dim=1).tolist() == [1000, 500, 250, 200, 200]
    assert bool((kept[:-1] | ~kept[1:]).all())
    assert not torch.equal(kept, other)
    torch.manual_seed(0)
    assert torch.equal(kept, nested(1000, 5, 0.5, torch.device("cpu")))
    assert nested(3, 3, 1.0, torch.device("cpu")).all()


def test_the_loss_by_hand(target: MultiLayerCausalLM, source: Features) -> None:
    """The mean over the tokens whose row is kept, depth by depth."""
    module, batch = make_module(target, loss="soft_cross_entropy", decay=0.5).train(), source.batch([1])
    torch.manual_seed(3)
    loss, steps = module._loss(module._unrolled(batch))
    torch.manual_seed(3)
    kept = nested(10, STEPS, 0.6, torch.device("cpu"))  # rows 0 to 9 predict tokens 3 to 11
    assert kept.sum(dim=1).tolist() == [10, 6, 4]
    with torch.inference_mode():
        q = F.linear(module.unroll(batch, torch.arange(12)), module.draft.lm_head.weight).log_softmax(-1)
        p = target.head(batch.last_hidden)[:, IDS].softmax(-1)
        wanted = []
        for depth in range(STEPS):
            rows = [row for row in range(10) if kept[depth, row] and 3 <= row + 2 + depth < 12]
            wanted.append(torch.stack([-(p[row + 1 + depth] * q[depth, row]).sum() for row in rows]).mean())
    torch.testing.assert_close(steps, torch.stack(wanted).float(), rtol=1e-5, atol=0)
    assert loss.item() == pytest.approx(sum(0.5**depth * float(value) for depth, value in enumerate(wanted)), rel=1e-5)


def test_validation_draws_nothing(target: MultiLayerCausalLM, source: Features) -> None:
    module, batch, state = make_module(target), source.batch([0, 1, 2]), torch.get_rng_state()
    module._unrolled(batch)
    assert torch.equal(state, torch.get_rng_state())
    module.train()._unrolled(batch)
    assert not torch.equal(state, torch.get_rng_state())


def test_gradients_reach_every_weight_of_the_draft_and_nothing_else(
    target: MultiLayerCausalLM, source: Features
) -> None:
    module = make_module(target, keep=1.0).train()
    loss, _ = module._loss(module._unrolled(source.batch([0, 1, 2])))
    loss.backward()
    for key, parameter in module.draft.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert (parameter.grad != 0).all() if parameter.ndim == 1 else (parameter.grad != 0).any(dim=1).all(), key
    assert not any(value.requires_grad or value.grad is not None for value in target.model.parameters())


def test_a_batch_without_supervised_tokens_teaches_nothing(target: MultiLayerCausalLM, source: Features) -> None:
    module, batch = make_module(target).train(), source.batch([0])
    loss, _ = module._loss(module._unrolled(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))))
    assert loss.item() == 0
    loss.backward()


def test_other_steps_than_drafts_are_refused(target: MultiLayerCausalLM) -> None:
    with pytest.raises(DraftwrightError, match=r"module\.steps=2 but one pass .* 3 tokens: .* draft\.num_drafts"):
        make_module(target, steps=2)
