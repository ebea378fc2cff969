"""`python -m eval toy`: one round, told truthfully."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.cli import main
from eval.toy import DRAFTS, TARGETS, Round, play, tell
from spec_decode.drafters.leviathan import LanguageModelDraft
from spec_decode.sampling import Sampling
from spec_decode.toy import BigramLM
from spec_decode.tree import StaticTree


@pytest.fixture
def run_toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["eval", "toy", *words])
        main()
        return " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.parametrize("draft", ["eagle3", "medusa", "leviathan"])
@pytest.mark.parametrize("model", ["transformer", "bigram"])
@pytest.mark.parametrize("tree", ["sampled", "chain", "dynamic"])
def test_every_draft_plays_a_round(run_toy: Any, draft: str, model: str, tree: str) -> None:
    told = run_toy(f"draft={draft}", f"model={model}", f"tree={tree}")
    assert "the last committed token" in told
    assert "was drawn from" in told
    assert "for one pass of the target" in told


def test_an_untrained_draft_shows_a_short_path() -> None:
    accepted = []
    for seed in range(40):
        torch.manual_seed(seed)
        target = TARGETS["transformer"](32, seed)
        generator = torch.Generator().manual_seed(seed)
        plan = StaticTree((3, 2), siblings="without_replacement")
        one = play(target, DRAFTS["eagle3"](target), torch.tensor([1, 2, 3]), plan, Sampling(1.0), generator)
        accepted.append(len(one.verdict.path) - 1)
    assert sum(accepted) / len(accepted) < 1


def played(draft_is_target: bool) -> Round:
    table = torch.tensor([[0.0, 0.6, 0.4], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    target = BigramLM(table)
    draft = LanguageModelDraft(target if draft_is_target else BigramLM(torch.eye(3, dtype=torch.float64)))
    plan, generator = StaticTree((1, 1), siblings="independent"), torch.Generator().manual_seed(0)
    return play(target, draft, torch.tensor([0, 1]), plan, Sampling(1.0), generator)


def test_what_is_told_is_what_was_decided(capsys: pytest.CaptureFixture) -> None:
    from rich.console import Console

    tell(played(draft_is_target=True), Console(width=200))
    told = capsys.readouterr().out
    assert told.count("accepted with probability 1.000") == 2
    assert "was drawn from the target's own distribution" in told
    assert "this round yields 3 tokens for one pass of the target" in told

    tell(
        played(draft_is_target=False), Console(width=200)
    )  # proposes the same token again, which the target never does
    told = capsys.readouterr().out
    assert "p 0.000  rejected with probability 1.000" in told
    assert "not reached" in told
    assert "accepted nothing" in told
    assert "was drawn from the residual after 1 rejection:" in told


def test_bad_prompts_are_refused(run_toy: Any, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_toy("prompt=[1,99]")
    assert "eval: prompt=[1, 99] must hold tokens from 0 to 11" in capsys.readouterr().err
