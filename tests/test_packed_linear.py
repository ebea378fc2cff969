"""Linear layers with packed weights compute what plain ones do."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from spec_decode.layers import FrozenHead
from spec_decode.packed_linear import PackedLinear, pack_linears
from spec_decode.target_hf import HFTarget


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 5), (64,)])
def test_a_packed_layer_computes_what_the_plain_one_does(bias: bool, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    x = torch.randn(*rows, 24)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(plain)(x), plain(x), rtol=1e-5, atol=1e-6)


def test_a_packed_target_keeps_its_parameters_and_its_output(tiny_llama: Callable[..., LlamaForCausalLM]) -> None:
    target, packed = (HFTarget(tiny_llama(tie_word_embeddings=True), "tiny") for _ in range(2))
    pack_linears(packed.model)
    assert sum(isinstance(module, PackedLinear) for module in packed.model.modules()) == 8 * 7 + 1
    assert packed.identity() == target.identity()
    assert packed.head_weight() is packed.model.get_input_embeddings().weight  # still tied
    ids = torch.arange(20)[None]
    theirs, ours = (t.forward(ids, logits=slice(None)).logits for t in (target, packed))
    assert theirs is not None
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    pack_linears(packed.model)  # a second time changes nothing
    again = packed.forward(ids, logits=slice(None)).logits
    assert again is not None
    assert torch.equal(again, ours)


def test_weights_that_cannot_be_packed_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    pack_linears(model)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert model(x).dtype == torch.float64


def test_a_frozen_head_is_packed_and_still_not_stored() -> None:
    torch.manual_seed(0)
    draft = nn.Module()
    draft.frozen_head = FrozenHead(8, 16)
    draft.frozen_head.weight.normal_()
    x, weight = torch.randn(3, 8), draft.frozen_head.weight
    pack_linears(draft)
    assert isinstance(draft.frozen_head, PackedLinear)
    torch.testing.assert_close(draft.frozen_head(x), x @ weight.T)
    assert draft.state_dict() == {}
    assert draft.frozen_head.weight is weight


def test_a_packed_model_can_be_copied_cast_and_moved() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    exact, x = copy.deepcopy(plain).double(), torch.randn(3, 8)
    pack_linears(plain)
    again = copy.deepcopy(plain)
    torch.testing.assert_close(again.double()(x.double()), exact(x.double()), rtol=0, atol=1e-12)
    torch.testing.assert_close(again.float()(x), exact.float()(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain(x), exact(x), rtol=1e-5, atol=1e-6)
    packed = plain[0].packed
    assert plain.to("cpu")[0].packed is packed  # nothing changed, nothing is packed again
    assert plain.to("meta")[0].packed is None


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch module.*, not int"):
        pack_linears(3)  # type: ignore[arg-type]
