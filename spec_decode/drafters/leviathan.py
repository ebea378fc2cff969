"""A small causal language model as the draft (Leviathan, Kalman and Matias, ICML 2023, arXiv:2211.17192).

The draft runs on the committed tokens alone and shares nothing with the target but the vocabulary. It decodes with a
key/value cache of its own; the rows of a proposed tree leave the cache again, and what the target accepted runs
together with the next root.

`LanguageModelDraft` takes any model as it is. `LeviathanDraft` is one that is trained for its target (DistillSpec,
arXiv:2310.08461); its folder is that of a Hugging Face model too, which other programs load as such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from spec_decode.checkpoint import read_config, read_tensors, write_draft
from spec_decode.drafter import Drafter, VocabularyDrafter
from spec_decode.errors import DraftwrightError, check_positive, check_type
from spec_decode.feature_drafter import FeatureDraftConfig
from spec_decode.growth import LevelMask, grow
from spec_decode.sampling import GREEDY, Sampling
from spec_decode.target import Cache, Target, TargetOutput, check_target
from spec_decode.target_hf import HFTarget, new_llama, open_draft_model, untrained_model
from spec_decode.tree import Tree, TreePlan


@dataclass
class LanguageModelState:
    """The draft's cache, and committed tokens int64 [M] that it does not hold yet."""

    cache: Cache
    pending: Tensor


class LanguageModelDraft(Drafter):
    """Any causal LM with the target's vocabulary, itself wrapped as a target (`HFTarget`)."""

    def __init__(self, model: Target) -> None:
        check_target("model", model)
        super().__init__()
        self.model = model

    def bind(self, target: Target) -> None:
        if self.model.spec.vocab_size != target.spec.vocab_size:
            raise DraftwrightError(
                f"draft '{self.model.spec.name}' has a vocabulary of {self.model.spec.vocab_size} tokens, but target "
                f"'{target.spec.name}' has {target.spec.vocab_size}: choose a draft with the target's tokenizer"
            )

    def start(self, output: TargetOutput, ids: Tensor) -> LanguageModelState:
        cache, ids = self.model.new_cache(), ids.to(self.model.device)
        if ids.numel() < self.model.spec.max_positions:
            self.model.forward(ids[None], cache=cache)
            ids = ids[:0]
        return LanguageModelState(cache, ids)

    def propose(
        self,
        state: LanguageModelState,
        root: int,
        plan: TreePlan,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
    ) -> Tree:
        state.pending = torch.cat((state.pending, state.pending.new_tensor([root])))
        committed = state.cache.length() + state.pending.numel()
        room = self.model.spec.max_positions - committed + 1  # the deepest nodes never run
        if room < 1:  # the target's context may be longer than the draft's
            return Tree.of_root(root)
        output = self.model.forward(state.pending[None], cache=state.cache, logits=slice(-1, None))
        state.pending = state.pending[:0]
        step = _TreeStep(self.model, state.cache)
        assert output.logits is not None
        logp = _log_q(output.logits[0, -1])
        tree = grow(logp, step, plan.cut(room), root, sampling=sampling, generator=generator)
        state.cache.keep([committed], committed, [torch.empty(0, dtype=torch.int64)])
        return tree

    def commit(self, state: LanguageModelState, tree: Tree, path: Tensor, output: TargetOutput) -> LanguageModelState:
        state.pending = torch.cat((state.pending, tree.tokens[path[1:]].to(state.pending.device)))
        return state


@dataclass(frozen=True, kw_only=True)
class LeviathanConfig(FeatureDraftConfig):
    """A Llama of `num_layers` layers, by default as wide as the target, with tied embeddings.

    path: a trained causal LM of the same vocabulary to start from, a folder or hub name; its sizes count, not these.
    """

    num_layers: int = 2
    path: str | None = None

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        check_positive(**{name: getattr(self, name) for name in sizes})
        if self.draft_vocab_size != self.vocab_size:
            raise DraftwrightError(
                f"draft_vocab_size {self.draft_vocab_size} is not possible, since a language model scores all "
                f"{self.vocab_size} tokens of the target: use draft_vocab_size=null"
            )


class LeviathanDraft(LanguageModelDraft, VocabularyDrafter):
    """A causal LM that is trained to imitate the target."""

    config: LeviathanConfig
    model: HFTarget

    def __init__(self, config: LeviathanConfig, model: HFTarget | None = None) -> None:
        """model: used instead of one that is made as the config says."""
        check_type("config", config, LeviathanConfig, "a LeviathanConfig")
        VocabularyDrafter.__init__(self, config)
        self.model = model or _first_model(config)
        self.lm = self.model.model.requires_grad_(True).train()  # a submodule, unlike its wrapper

    def forward(self, ids: Tensor) -> Tensor:
        """The states [B, T, H] that the head reads, of ids [B, T]; row t predicts token t + 1."""
        return self.model.states(ids)

    def init_head(self, head_weight: Tensor) -> None:
        """Also the embedding, which is the same matrix. A draft of another width or with weights keeps its own."""
        weight = self.model.head_weight()
        if self.config.path is None and weight.shape == head_weight.shape:
            with torch.no_grad():
                weight.copy_(head_weight)

    def heads(self) -> list[Tensor]:
        return [self.model.head_weight()]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts. Rotary frequencies stay in fp32, since their error grows with the position."""
        kept = dict(self.lm.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            module, _, attribute = name.rpartition(".")
            setattr(self.lm.get_submodule(module), attribute, buffer.to(self.model.device))
        return self

    # --- files -----------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, readme: str = "") -> None:
        config = self.model.config_json() | {"target": self.config.target, "tokenizer": self.config.tokenizer}
        write_draft(type(self), config, self._weights(), Path(folder), readme)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load a folder written by `save_pretrained`.

        Raises DraftwrightError that names the missing, unexpected or wrongly shaped tensor.
        """
        folder = Path(folder)
        config: dict[str, Any] = read_config(folder)
        model = untrained_model(folder)
        about = {name: str(config.get(name, "")) for name in ("target", "tokenizer")}
        draft = cls(LeviathanConfig.for_target(model.spec, num_layers=model.spec.num_layers, **about), model)
        draft.lm.load_state_dict(read_tensors(folder, draft._weights()), strict=False)  # a tied head comes by itself
        return draft

    def _weights(self) -> dict[str, Tensor]:
        """Under the names that Hugging Face uses; a tied matrix once."""
        return dict(self.lm.named_parameters())


def _first_model(config: LeviathanConfig) -> HFTarget:
    """The model that training starts from. Raises DraftwrightError for heads that don't divide each other."""
    if config.path is not None:
        return open_draft_model(config.path)
    if config.hidden_size % config.num_heads or config.num_heads % config.num_kv_heads:
        raise DraftwrightError(
            f"draft.hidden_size={config.hidden_size} must be a multiple of draft.num_heads={config.num_heads}, and "
            f"that of draft.num_kv_heads={config.num_kv_heads}: choose other sizes"
        )
    return new_llama(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        max_position_embeddings=config.max_positions,
    )


class _TreeStep:
    """Runs tree nodes through the language model, one call per level."""

    def __init__(self, model: Target, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.position = cache.length()
        self.mask = LevelMask(model.device)

    def __call__(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        positions = torch.full_like(tokens, self.position)[None]
        mask = self.mask.extend(parent_rows)
        output = self.model.forward(tokens[None], cache=self.cache, positions=positions, mask=mask, logits=slice(None))
        self.position += 1
        assert output.logits is not None
        return _log_q(output.logits[0])


def _log_q(logits: Tensor) -> Tensor:
    """Log-probabilities in at least fp32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
