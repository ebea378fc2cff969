import copy
import math

import pytest
import torch
from torch import nn

from spec_decode.errors import DraftwrightError
from train.optim import MuonAdamW, build_optimizer, warmup_cosine


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(12, 8)
        self.fc = nn.Linear(8, 8, bias=True)
        self.norm = nn.RMSNorm(8)
        self.lm_head = nn.Linear(8, 12, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.fc(self.embed_tokens(ids))))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.embed_tokens.weight.requires_grad_(False)
    return net


def _backward(net: Net, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(12, (20,), generator=generator)
    net.zero_grad()
    nn.functional.cross_entropy(net(ids), ids.roll(1)).backward()


def _muon(net: nn.Module) -> MuonAdamW:
    optimizer = build_optimizer(net.named_parameters(), name="muon", lr=0.02, head_lr_scale=0.25, weight_decay=0.1)
    assert isinstance(optimizer, MuonAdamW)
    return optimizer


def _weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def test_frozen_parameters_are_left_out_and_rates_follow_the_kind(net: Net) -> None:
    groups = _muon(net).param_groups
    assert [[p.shape for p in group["params"]] for group in groups] == [[(8, 8)], [(12, 8)], [(8,), (8,)]]
    assert [group["lr"] for group in groups] == [0.02, 0.005, 0.005]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


@pytest.mark.parametrize("bfloat16", [True, False])
def test_muon_multiplies_in_fp32_where_bfloat16_is_slow(
    bfloat16: bool, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.optim.multiplies_bfloat16", lambda device: bfloat16)
    before, optimizer = net.fc.weight.detach().clone(), _muon(net)
    _backward(net, 0)
    optimizer.step()
    update = (net.fc.weight.detach() - before * (1 - 0.02 * 0.1)) / (-0.02 * 0.2 * math.sqrt(8))
    rounded = update.bfloat16().float()
    assert torch.allclose(update, rounded, rtol=0, atol=1e-5) is bfloat16  # Newton-Schulz ended in that dtype
    assert torch.linalg.svdvals(update)[:6] == pytest.approx([0.9] * 6, abs=0.35)


def test_one_optimizer_equals_the_two_run_separately(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.optim.multiplies_bfloat16", lambda device: True)
    twin = copy.deepcopy(net)
    ours = _muon(net)
    muon = torch.optim.Muon([twin.fc.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [twin.lm_head.weight], "weight_decay": 0.1},
            {"params": [twin.fc.bias, twin.norm.weight], "weight_decay": 0.0},
        ],
        lr=0.005,
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(4):
        _backward(net, step)
        ours.step()
        _backward(twin, step)
        muon.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(_weights(net), _weights(twin), strict=True))


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_state_dict_round_trip_continues_exactly(net: Net, name: str, tmp_path) -> None:
    def build(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = build_optimizer(model.named_parameters(), name=name, lr=0.02, head_lr_scale=0.5)
        return optimizer, warmup_cosine(optimizer, total_steps=8, warmup_steps=2, final_ratio=0.1)

    optimizer, schedule = build(net)
    for step in range(3):
        _backward(net, step)
        optimizer.step()
        schedule.step()
    torch.save([net.state_dict(), optimizer.state_dict(), schedule.state_dict()], tmp_path / "state")

    twin = Net()
    twin.embed_tokens.weight.requires_grad_(False)
    twin_optimizer, twin_schedule = build(twin)
    states = torch.load(tmp_path / "state", weights_only=True)
    for part, state in zip((twin, twin_optimizer, twin_schedule), states, strict=True):
        part.load_state_dict(state)
    for model, opt, sched in ((net, optimizer, schedule), (twin, twin_optimizer, twin_schedule)):
        for step in range(3, 6):
            _backward(model, step)
            opt.step()
            sched.step()
    assert all(torch.equal(a, b) for a, b in zip(_weights(net), _weights(twin), strict=True))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in twin_optimizer.param_groups]


def test_schedule_reaches_both_parts(net: Net) -> None:
    optimizer = _muon(net)
    warmup_cosine(optimizer, total_steps=10, warmup_steps=4, final_ratio=0.0)
    assert [part.param_groups[0]["lr"] for part in optimizer._parts] == [0.02 / 4, 0.005 / 4]


def test_closure_is_called_once_with_gradients(net: Net) -> None:
    optimizer, calls = _muon(net), []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        _backward(net, 0)
        return 7.0

    before = _weights(net)
    with torch.no_grad():
        assert optimizer.step(closure) == 7.0
    assert calls == [True]
    changed = [not torch.equal(a, b) for a, b in zip(before, _weights(net), strict=True)]
    assert changed == [False, True, True, True, True]  # the frozen embedding stays


def test_warmup_and_cosine_values() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(optimizer, total_steps=8, warmup_steps=4, final_ratio=0.2)
    rates = []
    for _ in range(10):
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
        optimizer.step()
        schedule.step()
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[6] == 0.6  # half way between 1 and 0.2
    assert rates[8:] == [0.2, 0.2]


def test_unknown_name_is_one_sentence(net: Net) -> None:
    with pytest.raises(DraftwrightError, match="name='lion' is unknown; choose muon or adamw"):
        build_optimizer(net.named_parameters(), name="lion", lr=1.0)
