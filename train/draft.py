"""Makes the untrained draft of any variant for a target."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from torch import Tensor

from spec_decode.drafter import Drafter
from spec_decode.errors import DraftwrightError
from spec_decode.target import Target


def build_draft(kind: type[Drafter], target: Target, vocabulary: Tensor, tokenizer: str, **options: Any) -> Any:
    """A new `kind`, shaped for the target and bound to it, its head started from the target's rows.

    vocabulary: ascending target ids [V_draft]; tokenizer: fingerprint; options: fields of the draft's config
    dataclass. Raises DraftwrightError for an unknown option or one that doesn't fit the target.
    """
    config_kind = get_type_hints(kind.__init__)["config"]
    known = {field.name for field in dataclasses.fields(config_kind)}
    if unknown := sorted(options.keys() - known):
        raise DraftwrightError(f"there is no config key 'draft.{unknown[0]}'; choose from: {', '.join(sorted(known))}")
    config = config_kind.for_target(target.spec, draft_vocab_size=vocabulary.numel(), tokenizer=tokenizer, **options)
    draft = kind(config)
    draft.set_vocabulary(vocabulary)  # type: ignore[operator]
    draft.init_head(target.head_weight())  # type: ignore[operator]
    draft.bind(target)
    return draft
