"""Drafts in the files of those who serve them: export_draft maps one of ours to a format, import_draft back.

Both are pure: reading and writing is up to the caller. A consumer is a file with its `LAYOUTS`, one for each kind of
draft that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_decode.drafter import VocabularyDrafter, check_sizes
from spec_decode.errors import DraftwrightError, first_line
from spec_decode.formats import dflash, dspark, medusa, p_eagle, safeailab, sglang, speculators, vllm
from spec_decode.formats.layout import NOTE, VOCABULARY, Files, Layout, ServedTarget
from spec_decode.formats.recognise import recognise

FORMATS: dict[str, tuple[Layout, ...]] = {
    "vllm": (*vllm.LAYOUTS, dflash.LAYOUT, dspark.LAYOUT, p_eagle.LAYOUT),
    "sglang": sglang.LAYOUTS,
    "speculators": speculators.LAYOUTS,
    "safeailab": safeailab.LAYOUTS,
    "medusa": medusa.LAYOUTS,
}

# vLLM 0.32 reads MTP modules only as parts of the models that were trained with them, DeepSeek's for one, and no Hydra.
_NO_SERVER = (
    "Draftwright writes no server's format for it; measure it with `python -m eval`, and train eagle3, eagle, medusa, "
    "dflash, dspark or p_eagle for serving"
)


def export_draft(draft: VocabularyDrafter, name: str, target: ServedTarget) -> Files:
    """The draft as the format `name` of FORMATS has it.

    Raises DraftwrightError naming what the format can't hold.
    """
    layout = find_layout(type(draft), name)
    config: Any = draft.config
    check_sizes(config, target.spec)
    tensors = draft.state_dict()
    written = layout.write(config, tensors, target)
    floats = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
    known = {"target": config.target or target.spec.name, "tokenizer": config.tokenizer, **written.get(NOTE, {})}
    layers = {"target_layers": list(draft.taps)} if draft.taps else {}
    files = {theirs: tensors[ours] for ours, theirs in layout.names(written, config).items()}
    files = layout.pack(files, config)
    if layout.embeddings and layout.stores_embeddings:
        files[layout.embeddings] = target.embeddings().to(floats[0])
    dtype = str(floats[0]).removeprefix("torch.")
    return Files({**written, "torch_dtype": dtype, NOTE: known | layers}, files, layout.weights)


def find_layout(kind: type, name: str) -> Layout:
    """How the format stores drafts of this class; raises DraftwrightError naming the formats that do."""
    for layout in FORMATS[name]:
        if layout.draft is kind:
            return layout
    others = [other for other, layouts in FORMATS.items() if any(layout.draft is kind for layout in layouts)]
    advice = f"choose format={' or format='.join(others)}" if others else _NO_SERVER
    raise DraftwrightError(f"format={name} has no place for drafts of the class {kind.__name__}: {advice}")


def import_draft(
    config: dict[str, Any], tensors: Mapping[str, Tensor], target_layers: tuple[int, ...] | None = None
) -> tuple[VocabularyDrafter, str]:
    """A draft of ours from a consumer's config.json and tensors, and the name of the format.

    target_layers: where config.json leaves them open, in Hugging Face numbering. Raises DraftwrightError naming the
    unknown or missing tensor or the one of a wrong shape, and the key that a draft of ours can't have.
    """
    layout = recognise(config, tensors, FORMATS)
    tensors = {_renamed(name, layout.renamed): tensor for name, tensor in tensors.items()}
    try:
        draft: Any = layout.draft(layout.read(config, tensors, target_layers))
    except DraftwrightError:
        raise
    except (TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise DraftwrightError(
            f"config.json has a value that can't be right ({first_line(error)}): correct it"
        ) from error
    tensors = layout.unpack(tensors)
    own: dict[str, Tensor] = draft.state_dict()
    names = layout.names(config, draft.config)
    if "d2t" in tensors and "lm_head.weight" in names:  # also where the whole vocabulary is only reordered
        names |= {name: name for name in VOCABULARY}
    _check(tensors, {theirs: own[ours] for ours, theirs in names.items()}, layout)
    own |= {ours: tensors[theirs] for ours, theirs in names.items() if theirs in tensors}
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    for name in own.keys() - names.keys() - {*VOCABULARY}:  # a bias, say, of which the file's consumer has none
        own[name] = torch.zeros_like(own[name], dtype=dtype)
    if "d2t" in names:
        _sort_vocabulary(own, "t2d" in tensors)
    draft.load_state_dict(own, assign=True)  # in the file's dtype
    return draft, layout.name


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    for theirs, ours in beginnings.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], layout: Layout) -> None:
    """Names and shapes; embeddings may be there and aren't needed, and so may t2d be missing, which d2t implies."""
    kind = f"{layout.name}'s {layout.draft.__name__}"
    if missing := sorted(expected.keys() - tensors.keys() - {"t2d"}):
        raise DraftwrightError(f"the file lacks the tensor '{missing[0]}' of {kind} ({len(missing)} missing in all)")
    if unknown := sorted(tensors.keys() - expected.keys() - {layout.embeddings}):
        raise DraftwrightError(
            f"the file has the tensor '{unknown[0]}', which {kind} has no place for ({len(unknown)} in all)"
        )
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            raise DraftwrightError(
                f"the tensor '{name}' has shape {list(tensor.shape)}, and by config.json {kind} has "
                f"{list(expected[name].shape)}"
            )


def _sort_vocabulary(own: dict[str, Tensor], has_t2d: bool) -> None:
    """Rows of the head by ascending target id, as ours are (ModelOpt's are by frequency); t2d follows from d2t."""
    vocab_size = own["t2d"].numel()
    ids = own["d2t"].long() + torch.arange(own["d2t"].numel())
    if ids.min() < 0 or ids.max() >= vocab_size or ids.unique().numel() != ids.numel():
        raise DraftwrightError(
            f"the tensor 'd2t' doesn't name distinct tokens of a vocabulary of {vocab_size}: it must hold the target's "
            "id of each token minus the draft's"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if has_t2d and not torch.equal(own["t2d"].bool(), t2d):
        raise DraftwrightError(
            "the tensors 'd2t' and 't2d' name different tokens: one of them belongs to another draft"
        )
    order = ids.argsort()
    own["lm_head.weight"] = own["lm_head.weight"][order]
    own["d2t"], own["t2d"] = ids[order] - torch.arange(ids.numel()), t2d
