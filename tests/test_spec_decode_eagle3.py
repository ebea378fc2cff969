"""The EAGLE-3 draft folder and its fit to a target."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_decode.drafters import load_draft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.errors import DraftwrightError
from spec_decode.target_hf import HFTarget


@pytest.fixture
def make_target(tiny_llama):
    return lambda **changes: HFTarget(tiny_llama(**changes), "tiny")


@pytest.fixture
def folder(make_target, tmp_path):
    draft = Eagle3Draft(Eagle3Config.for_target(make_target().spec, draft_vocab_size=20))
    draft.set_vocabulary(torch.arange(0, 40, 2))
    draft.save_pretrained(tmp_path / "draft", readme="made by a test")
    return tmp_path / "draft"


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_folder_round_trip_is_exact(folder):
    torch.manual_seed(7)
    draft = load_draft(folder)
    assert isinstance(draft, Eagle3Draft)
    assert draft.vocabulary().tolist() == list(range(0, 40, 2))
    assert draft.t2d.nonzero().squeeze(1).tolist() == list(range(0, 40, 2))
    draft.save_pretrained(folder.parent / "again")
    first, second = (load_file(path / "model.safetensors") for path in (folder, folder.parent / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_tensor_names_and_shapes_are_those_that_servers_read(folder):
    shapes = {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": [32, 96],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.post_attention_layernorm.weight": [32],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "norm.weight": [32],
        "lm_head.weight": [20, 32],
        "d2t": [20],
        "t2d": [50],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lacks the tensor 'fc.weight'"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unexpected tensor 'extra'"),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}), r"'norm.weight' has shape \[3\]"),
    ],
)
def test_wrong_tensors_are_named(folder, change, message):
    edit_tensors(folder, change)
    with pytest.raises(DraftwrightError, match=message):
        Eagle3Draft.from_pretrained(folder)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DraftwrightError, match="truncated or damaged"):
        load_draft(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"drafter": "eagle9.Nothing"}, "unknown drafter 'eagle9.Nothing'"),
        ({"fusion": "sum"}, "fusion 'sum' is unknown"),
    ],
)
def test_wrong_config_is_named(folder, edit, message):
    config = json.loads((folder / "config.json").read_text()) | edit
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(DraftwrightError, match=message):
        load_draft(folder)


def test_missing_folder(tmp_path):
    with pytest.raises(DraftwrightError, match="is not a draft folder"):
        load_draft(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"hidden_size": 16, "head_dim": 8}, "hidden size 32"), ({"vocab_size": 51}, "vocabulary 50")],
)
def test_a_draft_of_another_target_is_refused(make_target, folder, changes, message):
    with pytest.raises(DraftwrightError, match=message):
        load_draft(folder).bind(make_target(**changes))


def test_the_head_starts_from_the_targets_rows(make_target):
    target = make_target()
    draft = Eagle3Draft(Eagle3Config.for_target(target.spec, draft_vocab_size=3))
    draft.set_vocabulary(torch.tensor([4, 9, 30]))
    draft.init_head(target.head_weight())
    assert torch.equal(draft.lm_head.weight, target.head_weight()[[4, 9, 30]])


def test_the_embedding_is_the_targets_and_not_stored(folder):
    assert not any("embed" in name for name in load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("layers", [(1, 1, 0), (2, 4, 8), (3, 2, 1), ()])
def test_layers_that_cannot_be_tapped(make_target, layers):
    spec = make_target().spec
    if not layers:
        spec = make_target(num_hidden_layers=4).spec
    with pytest.raises(DraftwrightError, match="ascending, distinct ids from 1 to"):
        Eagle3Config.for_target(spec, target_layers=layers)


@pytest.mark.parametrize("fc_norm", [False, True])
def test_features_in_the_targets_dtype_are_fused_with_and_without_autocast(make_target, fc_norm):
    torch.manual_seed(0)
    draft = Eagle3Draft(Eagle3Config.for_target(make_target().spec, fc_norm=fc_norm))
    features = torch.randn(5, 96).bfloat16()
    plain = draft.fuse(features)
    assert plain.dtype == torch.float32
    assert torch.equal(plain, draft.fuse(features.float()))
    with torch.autocast("cpu", torch.bfloat16):
        fused = draft.fuse(features)
    assert fused.dtype == torch.bfloat16
    torch.testing.assert_close(fused.float(), plain, rtol=0.02, atol=0.02)
