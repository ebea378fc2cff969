"""Block drafts: plain decoding's output under every tree, what a block sees, the folder and its errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from spec_decode.decode import batch_decode, plain_decode, speculative_decode
from spec_decode.drafters import load_draft
from spec_decode.drafters.block import BlockConfig, BlockDraft
from spec_decode.drafters.dspark import DSparkConfig, DSparkDraft
from spec_decode.errors import DraftwrightError
from spec_decode.sampling import Sampling
from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import DynamicTree, SparseTree, StaticTree, TreePlan, chain

VOCAB, CONTEXT, NEW = 32, 48, 14
IDS = torch.arange(1, VOCAB, 2)[:14]  # the draft vocabulary: odd tokens up to 27
PROMPTS = [[5, 17, 3, 2, 28, 9], [3], [9] * (CONTEXT - 4), [7] * CONTEXT, list(range(20))]
PLANS = [
    StaticTree((1, 1, 1)),
    StaticTree((3, 2, 2)),
    StaticTree((1,) * 7),  # deeper than a block
    SparseTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0))),
    DynamicTree(5, 4, 14),
    DynamicTree(2, 20, 40),  # wider than the draft vocabulary
]
KINDS: dict[str, tuple[type[BlockDraft], type[BlockConfig], dict[str, Any]]] = {
    "dflash": (BlockDraft, BlockConfig, {}),
    "causal": (BlockDraft, BlockConfig, {"causal": True, "mask_token": 4}),
    "shifted": (BlockDraft, BlockConfig, {"shifted": True}),
    "dspark": (DSparkDraft, DSparkConfig, {"markov_rank": 8}),
    "cut": (DSparkDraft, DSparkConfig, {"markov_rank": 8, "confidence_threshold": 0.5}),
}

every_draft = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(vocab_size=VOCAB, max_positions=CONTEXT)


def make_draft(name: str, target: MultiLayerCausalLM, **changes: Any) -> BlockDraft:
    """A random draft in fp64 of the tokens IDS, so that it is right now and then."""
    kind, config, options = KINDS[name]
    torch.manual_seed(0)
    sizes = {"draft_vocab_size": len(IDS), "num_drafts": 4, "num_layers": 2, "target_layers": (1, 4)}
    draft = kind(config.for_target(target.spec, **sizes | options | changes))
    draft.set_vocabulary(IDS)
    draft.init_head(target.head_weight())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return draft.double()


def started(draft: BlockDraft, target: MultiLayerCausalLM, ids: list[int]) -> Any:
    draft.bind(target)
    return draft.start(target.forward(torch.tensor([ids]), taps=draft.taps), torch.tensor(ids))


@pytest.fixture
def folder(name: str, target: MultiLayerCausalLM, tmp_path: Path) -> Path:
    draft = make_draft(name, target, tokenizer="abc")
    draft.float().save_pretrained(tmp_path / "draft", readme="made by a test\n")
    return tmp_path / "draft"


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS, ids=str)
@every_draft
def test_greedy_output_is_plain_decodings_alone_and_in_a_batch(
    target: MultiLayerCausalLM, name: str, plan: TreePlan
) -> None:
    draft = make_draft(name, target)
    together = batch_decode(target, draft, PROMPTS, tree=plan, max_new_tokens=NEW)
    for prompt, got in zip(PROMPTS, together, strict=True):
        alone = speculative_decode(target, draft, prompt, tree=plan, max_new_tokens=NEW)
        assert alone.tokens == plain_decode(target, prompt, max_new_tokens=NEW).tokens
        assert (got.tokens, got.accepted, got.offered) == (alone.tokens, alone.accepted, alone.offered)
    assert len(together[2].tokens) == 5  # up to the last position, and the token behind it
    assert len(together[3].tokens) == 1
    assert any(any(result.accepted) for result in together)
    assert max(max(result.offered, default=0) for result in together) == min(plan.depth, 4)


@every_draft
def test_only_the_draft_vocabulary_is_proposed(target: MultiLayerCausalLM, name: str) -> None:
    draft = make_draft(name, target)
    with torch.inference_mode():
        tree = draft.propose(started(draft, target, PROMPTS[0]), 8, StaticTree((len(IDS) + 3, 2)))
    assert tree.tokens[0] == 8
    assert sorted(tree.tokens[1 : len(IDS) + 1].tolist()) == IDS.tolist()
    assert set(tree.tokens[1:].tolist()) <= set(IDS.tolist())
    if name != "cut":
        assert len(tree) == 1 + 3 * len(IDS)


@every_draft
def test_state_after_any_path_is_that_of_a_fresh_start(target: MultiLayerCausalLM, name: str) -> None:
    """A draft that committed paths of a tree proposes what it would after a prompt of the same tokens."""
    draft, plan = make_draft(name, target), StaticTree((2, 2))
    with torch.inference_mode():
        ids, root = [5, 17, 3], 8
        state = started(draft, target, ids)
        for path in ([0], [0, 2, 5], [0, 1]):  # nothing accepted, two nodes, one
            tree = draft.propose(state, root, plan)
            fresh = draft.propose(started(draft, target, ids), root, plan)
            assert torch.equal(tree.tokens, fresh.tokens)
            torch.testing.assert_close(tree.log_q, fresh.log_q, rtol=0, atol=1e-5)
            assert state.keys[0].shape[1] == len(ids)  # the block's own keys are gone
            again = draft.propose(state, root, plan)  # and nothing is taken in twice
            assert torch.equal(tree.tokens, again.tokens)
            rows = []  # what the target says of each node, one path at a time
            for node in range(len(tree)):
                whole = torch.tensor([ids + tree.tokens[tree.ancestor_mask()[node]].tolist()])
                rows.append(target.forward(whole, taps=draft.taps).features[:, -1:])  # type: ignore[index]
            state = draft.commit(state, tree, torch.tensor(path), _Output(torch.cat(rows, dim=1)))  # type: ignore[arg-type]
            ids, root = ids + tree.tokens[path].tolist(), 11


class _Output:
    def __init__(self, features: Tensor) -> None:
        self.features = features


@pytest.mark.parametrize("name", ["dflash", "shifted"])
def test_a_shallow_tree_takes_the_first_tokens_of_a_deep_one(target: MultiLayerCausalLM, name: str) -> None:
    draft = make_draft(name, target)
    with torch.inference_mode():
        deep = draft.propose(started(draft, target, PROMPTS[0]), 8, chain(4))
        shallow = draft.propose(started(draft, target, PROMPTS[0]), 8, chain(2))
    assert torch.equal(deep.tokens[:3], shallow.tokens)
    assert torch.equal(deep.log_q[:3], shallow.log_q)  # type: ignore[index]


def norm(weights: Any, x: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weights.weight


def by_hand(draft: BlockDraft, target: MultiLayerCausalLM, features: Tensor, anchor: int) -> Tensor:
    """What the head reads of every slot, [B, H], straight from the paper's formulas; features [T, mH]."""
    config, eps = draft.config, draft.config.rms_norm_eps
    context = norm(draft.hidden_norm, features @ draft.fc.weight.T, eps)
    masked = draft.mask if config.mask_token is None else target.embed(torch.tensor(config.mask_token))
    x = torch.stack([target.embed(torch.tensor(anchor)), *[masked] * (config.block_size - 1)])
    count, size = len(context), len(x)
    visible = torch.ones(size, count + size)
    if config.causal:
        for slot in range(size):
            visible[slot, count + slot + 1 :] = 0
    for layer in draft.layers:
        attention, groups = layer.self_attn, config.num_heads // config.num_kv_heads
        seen = torch.cat((context, norm(layer.input_layernorm, x, eps)))
        places = torch.arange(count + size)
        q, k, v = (
            (seen @ each.weight.T).unflatten(-1, (-1, config.head_dim))
            for each in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q = attention.rope.rotate(norm(attention.q_norm, q, eps), places)[count:]
        k = attention.rope.rotate(norm(attention.k_norm, k, eps), places)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("mhd,nhd->hmn", q, k) / config.head_dim**0.5
        share = scores.masked_fill(visible == 0, -torch.inf).softmax(-1)
        x = x + torch.einsum("hmn,nhd->mhd", share, v).flatten(1) @ attention.o_proj.weight.T
        normed = norm(layer.post_attention_layernorm, x, eps)
        gated = F.silu(normed @ layer.mlp.gate_proj.weight.T) * (normed @ layer.mlp.up_proj.weight.T)
        x = x + gated @ layer.mlp.down_proj.weight.T
    return norm(draft.norm, x, eps)


@every_draft
def test_the_block_by_hand(target: MultiLayerCausalLM, name: str) -> None:
    draft = make_draft(name, target)
    with torch.inference_mode():
        state = started(draft, target, PROMPTS[0])
        features = state.features
        found = draft.run_block(state, 8)
        wanted = by_hand(draft, target, features, 8)
    assert found.shape == (4, 16)
    torch.testing.assert_close(found, wanted[-4:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("siblings", ["without_replacement", "independent"])
@every_draft
def test_drawn_siblings_come_from_the_slots_distribution(
    target: MultiLayerCausalLM, name: str, siblings: str, chi_square: Callable[[Tensor, Tensor], None]
) -> None:
    draft, sampling = make_draft(name, target), Sampling(temperature=0.8)
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(VOCAB)
    with torch.inference_mode():
        for _ in range(600):
            tree = draft.propose(
                started(draft, target, PROMPTS[0]), 8, StaticTree((2, 1), siblings), sampling, generator
            )
            counts[tree.tokens[1]] += 1
        assert tree.q is not None
        q = tree.q[1]
    assert q.shape == (VOCAB,)
    assert float(q.sum()) == pytest.approx(1)
    chi_square(counts, 600 * q)


# --- folders ---------------------------------------------------------------------------------------------------------


@every_draft
def test_a_folder_gives_the_same_draft_back(target: MultiLayerCausalLM, name: str, folder: Path) -> None:
    draft, loaded = make_draft(name, target, tokenizer="abc").float(), load_draft(folder)
    assert type(loaded) is type(draft)
    assert loaded.config == draft.config
    assert (folder / "README.md").read_text() == "made by a test\n"
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert not [key for key in ours if key.startswith(("lm_head", "embed"))]
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key
    decoded = [
        speculative_decode(target, each.double(), PROMPTS[0], tree=[3, 2], max_new_tokens=NEW)
        for each in (draft, loaded)
    ]
    assert (decoded[0].tokens, decoded[0].ranks) == (decoded[1].tokens, decoded[1].ranks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, key: tensors.pop(key), r"lacks the tensor '{key}' \(1 missing in all\)"),
        (lambda tensors, key: tensors.update(extra=torch.zeros(1)), r"unexpected tensor 'extra' \(1 in all\)"),
        (lambda tensors, key: tensors.update({key: torch.zeros(3)}), r"'{key}' has shape \[3\], expected \[\d+"),
    ],
    ids=["missing", "unexpected", "misshaped"],
)
@every_draft
def test_wrong_tensors_are_named(folder: Path, change: Callable[[dict[str, Tensor], str], Any], message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    for key in tensors:
        edited = dict(tensors)
        change(edited, key)
        save_file(edited, folder / "model.safetensors")
        with pytest.raises(DraftwrightError, match=message.format(key=re.escape(key))):
            load_draft(folder)


@pytest.mark.parametrize("value", ["12", 2.5, [3.5], -1, {}], ids=repr)
@every_draft
def test_config_values_that_cannot_be_are_named(
    target: MultiLayerCausalLM, name: str, folder: Path, value: Any
) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, right in config.items():
        # Text is free, a number may be a whole one, a bias any number, and the target itself refuses layers that it
        # doesn't have.
        fits = isinstance(right, str) or (isinstance(right, float) and value == 2.5)
        if fits or (key, value) in [("target_layers", [3.5]), ("rope_parameters", {}), ("confidence_bias", -1)]:
            continue
        path.write_text(json.dumps(config | {key: value}))
        with pytest.raises(DraftwrightError, match=key) as refused:
            load_draft(folder)
        assert "\n" not in str(refused.value)


@every_draft
def test_missing_and_unknown_config_keys_are_named(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"surprise": 1}))
    with pytest.raises(DraftwrightError, match="has the unknown key 'surprise'"):
        load_draft(folder)
    for key in ("target_layers", "hidden_size", "num_heads", "rope_parameters"):
        path.write_text(json.dumps({other: value for other, value in config.items() if other != key}))
        with pytest.raises(DraftwrightError, match=f"lacks the key '{key}'"):
            load_draft(folder)


# --- fit -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_drafts": 0}, "num_drafts must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"mask_token": VOCAB}, f"mask_token {VOCAB} is no token of the target: choose one from 0 to {VOCAB - 1}"),
        ({"target_layers": (3, 9)}, r"target layers \[3, 9\] cannot be tapped on a target of 7 layers"),
        ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size {VOCAB + 1} exceeds the target's vocabulary of {VOCAB}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@every_draft
def test_values_that_cannot_be_are_refused(
    target: MultiLayerCausalLM, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DraftwrightError, match=message):
        KINDS[name][1].for_target(target.spec, **changes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 20, "num_heads": 1}, "for target 'toy' with hidden size 16, but target 'toy' has 20"),
        ({"vocab_size": VOCAB + 1}, f"for target 'toy' with vocabulary {VOCAB}, but target 'toy' has {VOCAB + 1}"),
        ({"num_layers": 4}, "target layers .* cannot be tapped on a target of 4 layers"),
    ],
    ids=["hidden", "vocabulary", "layers"],
)
@every_draft
def test_another_target_is_refused(target: MultiLayerCausalLM, name: str, sizes: dict[str, int], message: str) -> None:
    other = MultiLayerCausalLM(**{"vocab_size": VOCAB, **sizes})
    draft = make_draft(name, target)
    with pytest.raises(DraftwrightError, match=message):
        speculative_decode(other, draft, PROMPTS[0], tree=[2], max_new_tokens=2)


def test_a_block_has_a_slot_for_its_anchor_unless_that_predicts_too(target: MultiLayerCausalLM) -> None:
    assert BlockConfig.for_target(target.spec, num_drafts=7).block_size == 8
    assert BlockConfig.for_target(target.spec, num_drafts=7, shifted=True).block_size == 7
    assert BlockConfig.for_target(target.spec).target_layers == (2, 3, 4)
    with pytest.raises(TypeError, match="config must be a BlockConfig, not dict"):
        BlockDraft({"hidden_size": 16})  # type: ignore[arg-type]
