"""What holds for every draft over the target's states: plain decoding's output, its folder, its fit to a target."""

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

from spec_decode.decode import batch_decode, plain_decode, speculative_decode
from spec_decode.drafter import VocabularyDrafter
from spec_decode.drafters import load_draft
from spec_decode.drafters.eagle import EagleConfig, EagleDraft
from spec_decode.drafters.hydra import HydraConfig, HydraDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.drafters.mtp import MtpConfig, MtpDraft
from spec_decode.errors import DraftwrightError
from spec_decode.feature_drafter import FeatureDrafter
from spec_decode.toy import MultiLayerCausalLM
from spec_decode.tree import DynamicTree, SparseTree, StaticTree, TreePlan

VOCAB, CONTEXT, NEW = 32, 48, 10
IDS = torch.arange(1, VOCAB, 2)[:14]  # the draft vocabulary: odd tokens up to 27
PROMPTS = [[5, 17, 3, 2, 28, 9], [3], [9] * (CONTEXT - 4), [7] * CONTEXT, list(range(20))]
PLANS = [
    StaticTree((3, 2, 2)),
    StaticTree((1,) * 7),  # deeper than Medusa and Hydra have heads
    SparseTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0))),
    DynamicTree(5, 4, 14),
    DynamicTree(2, 20, 40),  # wider than the draft vocabulary
]
KINDS: dict[str, tuple[type[VocabularyDrafter], Any]] = {
    "eagle": (EagleDraft, EagleConfig),
    "mtp": (MtpDraft, MtpConfig),
    "hydra": (HydraDraft, HydraConfig),
    "medusa": (MedusaDraftModel, MedusaConfig),
}
SHARING = [name for name, (kind, _) in KINDS.items() if issubclass(kind, FeatureDrafter)]

every_draft = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(vocab_size=VOCAB, max_positions=CONTEXT)


def make_draft(name: str, target: MultiLayerCausalLM, **changes: Any) -> VocabularyDrafter:
    """A random draft in fp64 of the tokens IDS, so that it is right now and then and its steps differ."""
    kind, config = KINDS[name]
    torch.manual_seed(0)
    draft = kind(config.for_target(target.spec, draft_vocab_size=len(IDS), **changes))
    draft.set_vocabulary(IDS)
    draft.init_head(target.head_weight())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return draft.double()


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
    assert {tuple(result.accepted) for result in together} > {()}


@every_draft
def test_only_the_draft_vocabulary_is_proposed(target: MultiLayerCausalLM, name: str) -> None:
    draft = make_draft(name, target)
    draft.bind(target)
    prompt = torch.tensor(PROMPTS[0])
    output = target.forward(prompt[None], taps=draft.taps, last_hidden=True)
    with torch.inference_mode():
        tree = draft.propose(draft.start(output, prompt), 8, StaticTree((len(IDS) + 3, 2)))
    assert tree.tokens[0] == 8
    assert sorted(tree.tokens[1 : len(IDS) + 1].tolist()) == IDS.tolist()
    assert set(tree.tokens[1:].tolist()) <= set(IDS.tolist())
    assert len(tree) == 1 + 3 * len(IDS)


@every_draft
def test_state_after_any_path_is_that_of_a_fresh_start(target: MultiLayerCausalLM, name: str) -> None:
    """A draft that committed paths of a tree proposes what it would after a prompt of the same tokens."""
    draft = make_draft(name, target)
    draft.bind(target)
    plan = StaticTree((2, 2))
    wanted: dict[str, Any] = {"taps": draft.taps, "last_hidden": True}

    def whole(ids: list[int]) -> Any:
        return draft.start(target.forward(torch.tensor([ids]), **wanted), torch.tensor(ids))

    with torch.inference_mode():
        ids, root, state = [5, 17, 3], 8, whole([5, 17, 3])
        for path in ([0], [0, 2, 5], [0, 1]):  # nothing accepted, two nodes, one
            tree = draft.propose(state, root, plan)
            fresh = draft.propose(whole(ids), root, plan)
            assert torch.equal(tree.tokens, fresh.tokens)
            torch.testing.assert_close(tree.log_q, fresh.log_q, rtol=0, atol=1e-5)
            # What the target says of each node, one path at a time.
            rows = []
            for node in range(len(tree)):
                chain = tree.tokens[tree.ancestor_mask()[node]].tolist()
                output = target.forward(torch.tensor([ids + chain]), **wanted)
                rows.append(output.last_hidden[:, -1:])  # type: ignore[index]
            state = draft.commit(state, tree, torch.tensor(path), _Output(torch.cat(rows, dim=1)))  # type: ignore[arg-type]
            ids, root = ids + tree.tokens[path].tolist(), 11


class _Output:
    features = logits = None

    def __init__(self, last_hidden: Tensor) -> None:
        self.last_hidden = last_hidden


# --- folders ---------------------------------------------------------------------------------------------------------


@every_draft
def test_a_folder_gives_the_same_draft_back(target: MultiLayerCausalLM, name: str, folder: Path) -> None:
    draft, loaded = make_draft(name, target, tokenizer="abc").float(), load_draft(folder)
    assert type(loaded) is type(draft)
    assert loaded.config == draft.config
    assert (folder / "README.md").read_text() == "made by a test\n"
    ours, theirs = draft.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key
    decoded = [
        speculative_decode(target, each.double(), PROMPTS[0], tree=[3, 2], max_new_tokens=NEW)
        for each in (draft, loaded)
    ]
    assert (decoded[0].tokens, decoded[0].ranks) == (decoded[1].tokens, decoded[1].ranks)
    assert any(decoded[0].ranks)


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


@every_draft
def test_missing_and_unknown_config_keys_are_named(name: str, folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"surprise": 1}))
    with pytest.raises(DraftwrightError, match="has the unknown key 'surprise'"):
        load_draft(folder)
    required = set(config) - {"drafter", "target", "tokenizer", "num_heads", "num_layers"}
    required -= {"draft_vocab_size"} if name == "medusa" else set()
    for key in required | ({"num_heads"} if name in SHARING else set()):
        path.write_text(json.dumps({other: value for other, value in config.items() if other != key}))
        with pytest.raises(DraftwrightError, match=f"lacks the key '{key}'"):
            load_draft(folder)


@pytest.mark.parametrize("value", ["12", None, 2.5, [3], True, -1], ids=repr)
@every_draft
def test_config_values_that_cannot_be_are_named(folder: Path, value: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, right in config.items():
        # Text is free, and a number may be a whole one.
        if key == "drafter" or isinstance(right, str) or (isinstance(right, float) and value == 2.5):
            continue
        path.write_text(json.dumps(config | {key: value}))
        with pytest.raises(DraftwrightError, match=key) as refused:
            load_draft(folder)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", SHARING)
def test_heads_that_cannot_share_keys_are_refused(target: MultiLayerCausalLM, name: str) -> None:
    _, config = KINDS[name]
    with pytest.raises(DraftwrightError, match="num_heads 3 is no multiple of num_kv_heads 2"):
        config.for_target(target.spec, num_heads=3, num_kv_heads=2)
    with pytest.raises(DraftwrightError, match="head_dim 7 is odd"):
        config.for_target(target.spec, head_dim=7)


# --- fit -------------------------------------------------------------------------------------------------------------


@every_draft
def test_wrong_types_are_named(target: MultiLayerCausalLM, name: str) -> None:
    kind, config = KINDS[name]
    with pytest.raises(TypeError, match=f"config must be an? {config.__name__}, not dict"):
        kind({"hidden_size": 16})  # type: ignore[arg-type]
    numbers = ["hidden_size", "vocab_size", "draft_vocab_size", "num_heads"]
    numbers += ["intermediate_size", "num_kv_heads", "head_dim", "max_positions"] if name in SHARING else []
    for number in numbers:
        with pytest.raises(TypeError, match=f"{number} must be an int, not str"):
            config.for_target(target.spec, **{number: "4"})
    with pytest.raises(TypeError, match="draft must be a Drafter, not Config"):
        speculative_decode(target, type("Config", (), {})(), [1], tree=[1], max_new_tokens=1)
    with pytest.raises(DraftwrightError, match=f"draft_vocab_size 33 exceeds the target's vocabulary of {VOCAB}"):
        config.for_target(target.spec, draft_vocab_size=VOCAB + 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 20, "num_heads": 1}, "for target 'toy' with hidden size 16, but target 'toy' has 20"),
        ({"vocab_size": VOCAB + 1}, f"for target 'toy' with vocabulary {VOCAB}, but target 'toy' has {VOCAB + 1}"),
    ],
    ids=["hidden", "vocabulary"],
)
@every_draft
def test_a_target_of_another_size_is_refused(
    target: MultiLayerCausalLM, name: str, sizes: dict[str, int], message: str
) -> None:
    other = MultiLayerCausalLM(**{"vocab_size": VOCAB, **sizes})
    draft = make_draft(name, target)
    before = {key: tensor.clone() for key, tensor in [*draft.named_parameters(), *draft.named_buffers()]}
    with pytest.raises(DraftwrightError, match=message):
        speculative_decode(other, draft, PROMPTS[0], tree=[2], max_new_tokens=2)
    assert all(torch.equal(tensor, before[key]) for key, tensor in [*draft.named_parameters(), *draft.named_buffers()])


@pytest.mark.parametrize("name", SHARING)
def test_a_shared_head_is_the_targets_and_not_stored(target: MultiLayerCausalLM, name: str, folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    assert not [key for key in stored if "head" in key or "rows" in key or "embed" in key]
    draft: Any = load_draft(folder)
    assert draft.heads()[0].abs().sum() == 0
    draft.double().bind(target)
    (head,) = draft.heads()
    assert torch.equal(head, target.head_weight()[IDS])
    assert not head.requires_grad
    other = MultiLayerCausalLM(vocab_size=VOCAB, max_positions=CONTEXT, seed=1)
    draft.bind(other)
    assert torch.equal(draft.heads()[0], other.head_weight()[IDS])


@pytest.mark.parametrize("name", ["hydra", "medusa"])
def test_own_heads_start_from_the_targets_rows(target: MultiLayerCausalLM, name: str) -> None:
    kind, config = KINDS[name]
    draft = kind(config.for_target(target.spec, draft_vocab_size=len(IDS), num_heads=3)).double()
    draft.set_vocabulary(IDS)
    draft.init_head(target.head_weight())
    assert len(draft.heads()) == 3
    for head in draft.heads():
        assert torch.equal(head, target.head_weight()[IDS])
        assert head.requires_grad
