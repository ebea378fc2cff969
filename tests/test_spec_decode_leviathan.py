"""`leviathan_decode`: any causal LM or drafter proposes a chain, and the output stays the target's. `LeviathanDraft`:
a language model that is made for its target, and its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from spec_decode.decode import leviathan_decode, plain_decode, speculative_decode
from spec_decode.drafters import load_draft
from spec_decode.drafters.eagle3 import Eagle3Config, Eagle3Draft
from spec_decode.drafters.leviathan import LanguageModelDraft, LeviathanConfig, LeviathanDraft
from spec_decode.drafters.medusa import MedusaConfig, MedusaDraftModel
from spec_decode.errors import DraftwrightError
from spec_decode.sampling import Sampling
from spec_decode.target import Target
from spec_decode.toy import BigramLM, MultiLayerCausalLM
from spec_decode.tree import DynamicTree, StaticTree, TreePlan

PROMPT = [5, 17, 3, 2, 28, 9]
VOCAB = 32


def bigram(seed: int, vocab: int = VOCAB, sharpness: float = 2.0) -> BigramLM:
    generator = torch.Generator().manual_seed(seed)
    return BigramLM((sharpness * torch.randn(vocab, vocab, dtype=torch.float64, generator=generator)).softmax(-1))


@pytest.fixture(scope="module")
def target() -> MultiLayerCausalLM:
    return MultiLayerCausalLM(vocab_size=VOCAB, max_positions=48)


def drafts(target: Target) -> dict[str, Any]:
    torch.manual_seed(0)
    eagle = Eagle3Draft(Eagle3Config.for_target(target.spec)).double()
    return {
        "itself": target,
        "another": MultiLayerCausalLM(vocab_size=VOCAB, num_layers=2, max_positions=48, seed=1),
        "shorter context": MultiLayerCausalLM(vocab_size=VOCAB, num_layers=2, max_positions=12, seed=1),
        "bigram": bigram(0),
        "eagle3": eagle,
        "medusa": MedusaDraftModel(MedusaConfig(16, VOCAB)).double(),
    }


@pytest.mark.parametrize("gamma", [1, 3, 6])
@pytest.mark.parametrize("name", ["itself", "another", "shorter context", "bigram", "eagle3", "medusa"])
def test_greedy_output_is_that_of_plain_decoding(target: MultiLayerCausalLM, name: str, gamma: int) -> None:
    for prompt in (PROMPT, [3], [9] * 44, [1] * 48):
        expected = plain_decode(target, prompt, max_new_tokens=20).tokens
        got = leviathan_decode(target, drafts(target)[name], prompt, gamma=gamma, max_new_tokens=20)
        assert got.tokens == expected
        assert max(got.offered, default=0) <= gamma


def test_a_draft_that_is_the_target_is_always_accepted(target: MultiLayerCausalLM) -> None:
    for sampling in (Sampling(), Sampling(1.0)):
        got = leviathan_decode(target, target, PROMPT, gamma=4, max_new_tokens=21, sampling=sampling)
        assert got.accepted == [4] * 4
        assert got.tau == 5.0


def test_a_round_of_the_draft_runs_what_was_committed_then_the_chain(target: MultiLayerCausalLM) -> None:
    draft = MultiLayerCausalLM(vocab_size=VOCAB, num_layers=2, max_positions=48)
    forward, widths = draft.forward, []

    def spying(ids: torch.Tensor, **options: Any) -> Any:
        widths.append(ids.shape[1])
        return forward(ids, **options)

    draft.forward = spying  # type: ignore[method-assign]
    got = leviathan_decode(target, draft, PROMPT, gamma=3, max_new_tokens=16)
    assert widths[0] == len(PROMPT)
    rounds = [widths[1 + 3 * i : 4 + 3 * i] for i in range(got.rounds)]
    assert [first for first, *_ in rounds] == [1, *(accepted + 1 for accepted in got.accepted[:-1])]
    assert all(rest == [1, 1] for _, *rest in rounds)


@pytest.mark.parametrize("plan", [StaticTree((3, 2, 2)), DynamicTree(3, 3, 9)], ids=str)
def test_a_language_model_also_grows_trees(target: MultiLayerCausalLM, plan: TreePlan) -> None:
    draft = LanguageModelDraft(drafts(target)["another"])
    expected = plain_decode(target, PROMPT, max_new_tokens=20).tokens
    assert speculative_decode(target, draft, PROMPT, tree=plan, max_new_tokens=20).tokens == expected
    itself = speculative_decode(target, LanguageModelDraft(target), PROMPT, tree=plan, max_new_tokens=20)
    # a dynamic tree leaves out even the likeliest path where its probability is small
    assert min(itself.accepted[:-1]) >= (3 if isinstance(plan, StaticTree) else 2)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=4), Sampling(1.0, top_p=0.8)], ids=str)
@pytest.mark.parametrize("rule", ["top_k", "without_replacement", "independent"])
def test_sampled_output_passes_a_chi_square_test(rule: str, sampling: Sampling, chi_square: Any) -> None:
    """The second to fourth token of 2,500 answers against their exact probabilities: a child of the root, one of a
    child, and what follows a whole accepted path. A right decoder fails once in 10,000 seeds (a false alarm)."""
    target, draft = bigram(0, 5, 1.0), LanguageModelDraft(bigram(1, 5, 1.0))
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(5, 5, 5, dtype=torch.float64)
    for _ in range(2500):
        result = speculative_decode(
            target,
            draft,
            [0],
            tree=StaticTree((2, 1), siblings=rule),
            max_new_tokens=4,
            sampling=sampling,
            generator=generator,
        )
        counts[tuple(result.tokens[1:])] += 1
    p = torch.stack([bigram_row(target, token, sampling) for token in range(5)])
    expected = 2500 * (p[0] @ p)[:, None, None] * p[:, :, None] * p
    assert counts[expected == 0].sum() == 0
    chi_square(counts, expected)


def bigram_row(target: BigramLM, token: int, sampling: Sampling) -> torch.Tensor:
    """By hand: temperature, then top-k, then top-p."""
    p = target.head(target.embed(torch.tensor(token))).div(sampling.temperature).softmax(-1)
    order = p.argsort(descending=True)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
        p = p / p.sum()
    mass = 0.0
    for place in order.tolist():
        if mass >= sampling.top_p:
            p[place] = 0
        mass += float(p[place])
    return p / p.sum()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": 3}, TypeError, "target must be a target such as HFTarget.*, not int"),
        ({"draft": nn.Linear(1, 1)}, TypeError, "draft must be a Drafter, or a target such as HFTarget.*, not Linear"),
        ({"gamma": 2.0}, TypeError, "gamma must be an int, not float"),
        ({"gamma": True}, TypeError, "gamma must be an int, not bool"),
        ({"gamma": 0}, ValueError, "gamma must be at least 1, got 0"),
        ({"input_ids": "hello"}, TypeError, "input_ids must be .*, not str"),
        ({"max_new_tokens": None}, TypeError, "max_new_tokens must be an int, not NoneType"),
        ({"sampling": 1.0}, TypeError, "sampling must be a Sampling, not float"),
        ({"draft": bigram(0, 5)}, ValueError, "'bigram' has a vocabulary of 5 tokens, but target 'toy' has 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_arguments_are_named(
    target: MultiLayerCausalLM, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"target": target, "draft": target, "input_ids": PROMPT, "gamma": 2, "max_new_tokens": 4} | change
    with pytest.raises(error, match=message):
        leviathan_decode(**arguments)


def test_a_language_model_draft_needs_a_target() -> None:
    with pytest.raises(TypeError, match="model must be a target such as HFTarget"):
        LanguageModelDraft(nn.Linear(1, 1))  # type: ignore[arg-type]


# --- LeviathanDraft ---------------------------------------------------------------------------------------------------


def make_draft(target: Target, **changes: Any) -> LeviathanDraft:
    """A random draft whose head is the target's, so that it is right now and then."""
    torch.manual_seed(0)
    draft = LeviathanDraft(LeviathanConfig.for_target(target.spec, tokenizer="abc", **changes))
    draft.init_head(target.head_weight())
    return draft


@pytest.fixture
def folder(target: MultiLayerCausalLM, tmp_path: Path) -> Path:
    make_draft(target).save_pretrained(tmp_path / "draft", readme="made by a test")
    return tmp_path / "draft"


@pytest.mark.parametrize("plan", [StaticTree((1, 1, 1)), StaticTree((3, 2, 2)), DynamicTree(3, 3, 9)], ids=str)
def test_a_trained_draft_decodes_like_plain_decoding(target: MultiLayerCausalLM, folder: Path, plan: TreePlan) -> None:
    accepted = 0
    for draft in (make_draft(target).double(), load_draft(folder)):
        for prompt in (PROMPT, [3], [9] * 44, [1] * 48):
            expected = plain_decode(target, prompt, max_new_tokens=20).tokens
            got = speculative_decode(target, draft, prompt, tree=plan, max_new_tokens=20)
            assert got.tokens == expected
            accepted += sum(got.accepted)
    assert accepted > 0


def test_it_is_a_llama_as_wide_as_the_target_that_starts_from_its_head(target: MultiLayerCausalLM) -> None:
    draft = make_draft(target)
    names = [name for name, parameter in draft.named_parameters() if parameter.requires_grad]
    assert len(names) == 1 + 2 * 9 + 1
    assert [name for name in names if "embed_tokens" in name or "lm_head" in name] == ["lm.model.embed_tokens.weight"]
    assert draft.heads()[0] is draft.lm.get_input_embeddings().weight
    assert torch.equal(draft.heads()[0], target.head_weight().float())
    narrow = make_draft(target, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
    assert narrow.heads()[0].shape == (VOCAB, 8)


def test_casting_leaves_rotary_frequencies_in_fp32(target: MultiLayerCausalLM) -> None:
    draft = make_draft(target)
    frequencies = draft.lm.model.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.model.dtype == torch.bfloat16
    assert torch.equal(draft.lm.model.rotary_emb.inv_freq, frequencies)


def test_the_folder_is_that_of_a_hugging_face_model(target: MultiLayerCausalLM, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    wanted = {"drafter": "leviathan.LeviathanDraft", "target": "toy", "tokenizer": "abc", "model_type": "llama"}
    assert config | wanted == config
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, LlamaForCausalLM)
    assert not any(loading.values())
    with torch.no_grad():
        wanted_logits = make_draft(target).lm(torch.tensor([PROMPT])).logits
        assert torch.equal(model(torch.tensor([PROMPT])).logits, wanted_logits)


def test_a_folder_is_written_again_as_it_was(folder: Path) -> None:
    draft = load_draft(folder)
    assert isinstance(draft, LeviathanDraft)
    assert (draft.config.target, draft.config.tokenizer, draft.config.num_layers) == ("toy", "abc", 2)
    draft.save_pretrained(folder.parent / "again", readme="made by a test")
    for name in ("model.safetensors", "README.md"):
        assert (folder / name).read_bytes() == (folder.parent / "again" / name).read_bytes()
    first, second = (json.loads((path / "config.json").read_text()) for path in (folder, folder.parent / "again"))
    assert first == second


def test_a_draft_in_bfloat16_says_so(target: MultiLayerCausalLM, tmp_path: Path) -> None:
    draft = make_draft(target).to(torch.bfloat16)
    draft.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    again = load_draft(tmp_path)
    assert torch.equal(again.heads()[0], draft.heads()[0].float())  # type: ignore[attr-defined]


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks the tensor 'model.norm.weight'"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unexpected tensor 'extra'"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"'model.norm.weight' has shape \[3\]"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable[[Tensors], Any], message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DraftwrightError, match=message):
        load_draft(folder)


def test_a_config_of_no_model_is_one_sentence(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for edit in ({"model_type": "llamas"}, {"hidden_size": "wide"}, {"num_attention_heads": 3}):
        (folder / "config.json").write_text(json.dumps(config | edit))
        with pytest.raises(DraftwrightError, match=r"config.json describes no model that .* can make") as error:
            load_draft(folder)
        assert "\n" not in str(error.value)


def test_a_trained_model_can_be_the_start(target: MultiLayerCausalLM, tmp_path: Path) -> None:
    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, **sizes, num_key_value_heads=1, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "small")
    draft = make_draft(target, path=str(tmp_path / "small"))
    draft.bind(target)
    draft.save_pretrained(tmp_path / "draft")
    loaded, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", output_loading_info=True)
    assert not any(loading.values())
    for state in (draft.lm.state_dict(), loaded.state_dict(), load_draft(tmp_path / "draft").lm.state_dict()):  # type: ignore[union-attr,operator]
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert draft.heads()[0].requires_grad


def test_a_start_that_does_not_fit_is_one_sentence(target: MultiLayerCausalLM, tmp_path: Path) -> None:
    with pytest.raises(DraftwrightError, match=r"the draft '.*nothing' could not be loaded .* as draft.path=FOLDER"):
        make_draft(target, path=str(tmp_path / "nothing"))
    MultiLayerCausalLM(vocab_size=7).model.save_pretrained(tmp_path / "other")
    with pytest.raises(DraftwrightError, match="has a vocabulary of 7 tokens, but target 'toy' has 32"):
        make_draft(target, path=str(tmp_path / "other")).bind(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 8}, "draft_vocab_size 8 is not possible, .* all 32 tokens .* use draft_vocab_size=null"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"hidden_size": 15}, "draft.hidden_size=15 must be a multiple of draft.num_heads=2"),
        ({"num_kv_heads": 3}, "and that of draft.num_kv_heads=3: choose other sizes"),
    ],
    ids=str,
)
def test_sizes_that_are_not_possible(target: MultiLayerCausalLM, changes: dict[str, int], message: str) -> None:
    with pytest.raises(DraftwrightError, match=message):
        make_draft(target, **changes)


def test_wrong_types_of_its_own_are_named() -> None:
    with pytest.raises(TypeError, match="config must be a LeviathanConfig, not dict"):
        LeviathanDraft({"num_layers": 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="folder must be a path, not int"):
        load_draft(3)  # type: ignore[arg-type]
