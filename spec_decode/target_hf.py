"""Any Llama-like Hugging Face causal LM as a target.

Only what is asked for is computed: chosen layers are read by hooks, the head runs on chosen rows.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from spec_decode.cache import TreeCache
from spec_decode.errors import DraftwrightError, check_type, first_line
from spec_decode.grouped_attention import group_attention
from spec_decode.packaged import default_cache, packaged_model
from spec_decode.target import TargetOutput, TargetSpec, check_taps

# Config fields of models whose logits are not simply head(last_hidden); we refuse them instead of being wrong.
_SCALED_HEADS = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None, "lm_head_multiplier": 1.0}
# Config fields that a draft is shaped by.
_SIZES = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)
# Config fields that say nothing about what a model computes; the dtype is that of the loaded weights.
_INCIDENTAL = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")


class HFTarget:
    """Wraps a transformers causal LM; see `spec_decode.target.Target` for the contract.

    Raises DraftwrightError for models that it would get wrong: sliding-window layers, scaled logits, a head with a
    bias, or an architecture that isn't Llama-like.
    """

    def __init__(self, model: PreTrainedModel, name: str = "", eos_token_ids: tuple[int, ...] = ()) -> None:
        """eos_token_ids: end-of-turn tokens beside those that the model's own configs name."""
        check_type("model", model, PreTrainedModel, "a transformers causal LM")
        group_attention(model)
        self.model = model.eval().requires_grad_(False)
        self.spec = _spec(model, name, eos_token_ids)
        self._base: Any = model.base_model
        # transformers 5.24 renamed the argument; older 5.x only know the old name.
        parameters = inspect.signature(self._base.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def new_cache(self) -> TreeCache:
        return TreeCache()

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(ids)

    def head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def head_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def states(self, ids: Tensor) -> Tensor:
        """Final-normed states [B, T, H] of ids [B, T], with the gradient that `forward` never has."""
        return self._base(input_ids=ids, use_cache=False).last_hidden_state

    def config_json(self) -> dict[str, Any]:
        """What config.json of a Hugging Face folder with this model holds."""
        kind = {"architectures": [type(self.model).__name__], "dtype": str(self.dtype).removeprefix("torch.")}
        return json.loads(self.model.config.to_json_string()) | kind

    def identity(self) -> str:
        return self._identity

    @cached_property
    def _identity(self) -> str:
        """Computed once: hashing the weights takes a second for each gigabyte or so."""
        config = {key: value for key, value in self.model.config.to_dict().items() if key not in _INCIDENTAL}
        digest = sha256(json.dumps([type(self.model).__name__, config], sort_keys=True, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def forward(
        self,
        ids: Tensor,
        *,
        cache: TreeCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        taps: tuple[int, ...] = (),
        logits: slice | None = None,
        last_hidden: bool = False,
    ) -> TargetOutput:
        past = cache.length() if cache is not None else 0
        if positions is None:
            positions = torch.arange(past, past + ids.shape[1], device=ids.device).expand(ids.shape)
        kwargs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": cache is not None}
        if cache is not None:
            kwargs[self._cache_argument] = cache
        if mask is not None:
            kwargs["attention_mask"] = self._additive(mask, past)
        captured: dict[int, Tensor] = {}
        with ExitStack() as stack, torch.no_grad():
            for tap in check_taps(taps, self.spec.num_layers) if taps else ():
                hook = self._base.layers[tap - 1].register_forward_hook(_store(captured, tap))
                stack.callback(hook.remove)
            hidden = self._base(**kwargs).last_hidden_state
            return TargetOutput(
                logits=self.head(hidden[:, logits]) if logits is not None else None,
                features=torch.cat([captured[tap] for tap in taps], dim=-1) if taps else None,
                last_hidden=hidden if last_hidden else None,
            )

    def _additive(self, mask: Tensor, past: int) -> Tensor:
        """bool [T, S] or [B, T, S] over the last S positions -> additive [1 or B, 1, T, past + T]."""
        *batch, rows, seen = mask.shape
        full = torch.zeros(*(batch or [1]), 1, rows, past + rows, dtype=self.dtype, device=mask.device)
        hidden = ~mask if not batch else ~mask[:, None]
        full[..., past + rows - seen :].masked_fill_(hidden, torch.finfo(self.dtype).min)
        return full


@dataclass(frozen=True)
class TargetSource:
    """Where a target comes from (conf/target/*.yaml): a folder or hub name, or a PyPI package with a GGUF file.

    device "auto" takes the first GPU if there is one.
    """

    path: str | None = None
    package: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    cache_dir: str = field(default_factory=default_cache)

    def __post_init__(self) -> None:
        if self.path is None and self.package is None:
            raise DraftwrightError("the target is not chosen: pass target.path=FOLDER_OR_HUB_NAME")
        if self.path is not None and self.package is not None:
            raise DraftwrightError(
                f"target.path={self.path} goes with target=hf, but the target is the package {self.package}: "
                "add target=hf"
            )
        if self.dtype not in ("float32", "bfloat16", "float16", "float64"):
            raise DraftwrightError(f"target.dtype '{self.dtype}' is unknown; choose float32, bfloat16 or float16")

    @cached_property
    def location(self) -> str:
        """Folder or hub name to load from. A packaged model is converted on first use."""
        if self.package is not None:
            return str(packaged_model(self.package, self.cache_dir))
        return os.path.expanduser(str(self.path))

    def name(self) -> str:
        """What reports call the target: a hub name, or the last component of a folder."""
        folder = Path(self.location)
        return folder.resolve().name if folder.is_dir() else self.location


def open_target(source: TargetSource) -> tuple[HFTarget, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer. Raises DraftwrightError when it isn't there."""
    check_type("source", source, TargetSource, "a TargetSource")
    tokenizer = open_tokenizer(source)
    model = _load(source.location, getattr(torch, source.dtype))
    # Chat models often keep the base model's end token in their config and name the turn's in the tokenizer.
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return HFTarget(_move(model, source.device), source.name(), end), tokenizer


def open_tokenizer(source: TargetSource) -> PreTrainedTokenizerBase:
    """The target's tokenizer alone."""
    location = source.location
    try:
        return AutoTokenizer.from_pretrained(location)
    except Exception as error:  # as in `_load`
        raise _not_loaded(location, error) from error


def sketch_target(source: TargetSource) -> HFTarget:
    """The target without its weights, to read sizes from; it can compute nothing. Raises as `open_target`."""
    location = source.location
    try:
        with torch.device("meta"):
            model = _untrained(AutoConfig.from_pretrained(location))
    except Exception as error:  # as in `_load`
        raise _not_loaded(location, error) from error
    return HFTarget(model, source.name())


def new_llama(**sizes: Any) -> HFTarget:
    """An untrained Llama in fp32 whose head is its embedding; sizes: fields of `LlamaConfig`."""
    return HFTarget(_untrained(LlamaConfig(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)))


def untrained_model(folder: Path) -> HFTarget:
    """A model in fp32 that is shaped as config.json in `folder` says. Raises DraftwrightError if it names none."""
    try:
        return HFTarget(_untrained(AutoConfig.from_pretrained(folder)), folder.name)
    except DraftwrightError:
        raise
    except Exception as error:  # as in `_load`
        raise DraftwrightError(
            f"{folder}/config.json describes no model that transformers can make ({first_line(error)}): write the "
            "draft again"
        ) from error


def open_draft_model(path: str) -> HFTarget:
    """The causal LM in fp32 that a draft starts from: draft.path, a folder or hub name."""
    location = os.path.expanduser(path)
    return HFTarget(_load(location, torch.float32, "draft"), path)


def _untrained(config: PreTrainedConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def _load(location: str, dtype: torch.dtype, role: str = "target") -> PreTrainedModel:
    """The causal LM in a folder or under a hub name. role: the section of the config whose `path` it is."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except Exception as error:  # transformers, safetensors and HTTP libraries share no base class
        raise _not_loaded(location, error, role) from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):  # transformers would leave them random
        raise DraftwrightError(
            f"the {role} '{location}' lacks the tensor '{missing[0]}' ({len(missing)} missing in all): pass a "
            f"complete model as {role}.path"
        )
    return model


def _not_loaded(location: str, error: Exception, role: str = "target") -> DraftwrightError:
    on_hub = not Path(location).exists() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", location)
    get = f", or run `hf download {location}` where the hub can be reached" if on_hub else ""
    return DraftwrightError(
        f"the {role} '{location}' could not be loaded ({first_line(error)}): pass a folder with config.json, "
        f"safetensors and tokenizer files as {role}.path=FOLDER{get}"
    )


def _move(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model on target.device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(device=device)  # type: ignore[call-arg]
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise DraftwrightError(
            f"the target can't be moved to target.device={device} ({first_line(error)}): use target.device=cpu, or a "
            "device with enough memory that torch finds"
        ) from error


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what turns text into ids, and of the chat template: equal exactly when token ids mean the same."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: Any = sorted(tokenizer.get_vocab().items())
    if backend is not None:
        content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # these change with use
    text = json.dumps([content, tokenizer.chat_template], ensure_ascii=False, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def _store(captured: dict[int, Tensor], tap: int) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        captured[tap] = output[0] if isinstance(output, tuple) else output

    return hook


def _spec(model: PreTrainedModel, name: str, more_eos: tuple[int, ...]) -> TargetSpec:
    config = model.config
    kind = f"model '{name}' ({type(model).__name__})"
    if not hasattr(model.base_model, "layers"):
        raise DraftwrightError(f"{kind} is not Llama-like: it has no list `layers`; choose another model")
    for size in _SIZES:
        if getattr(config, size, None) is None:
            raise DraftwrightError(f"{kind} is not Llama-like: its config has no {size}; choose another model")
    for scale, neutral in _SCALED_HEADS.items():
        if getattr(config, scale, neutral) not in (neutral, None):
            raise DraftwrightError(f"{kind} scales its logits ({scale}), which is not supported: choose another model")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise DraftwrightError(f"{kind} has a head with a bias, which is not supported: choose another model")
    # transformers keeps sliding_window on models that don't use it, but then lists no such layer in layer_types.
    layers = set(
        getattr(config, "layer_types", None) or ["sliding_attention"] * bool(getattr(config, "sliding_window", None))
    )
    if other := sorted(layers - {"full_attention"}):
        raise DraftwrightError(
            f"{kind} has layers of the kind {other[0]}, whose cache can't hold a tree: choose another model"
        )
    return TargetSpec(
        name=name,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_positions=config.max_position_embeddings,
        eos_token_ids=tuple(dict.fromkeys((*_eos(model.generation_config), *_eos(config), *more_eos))),
    )


def _eos(config: Any) -> tuple[int, ...]:
    """The end tokens that a config names: none, one or several."""
    eos = getattr(config, "eos_token_id", None)
    return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
