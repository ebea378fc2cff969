"""Makes the untrained draft of any variant for a target."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from spec_decode.drafter import VocabularyDrafter
from spec_decode.errors import DraftwrightError
from spec_decode.target import Target

Draft = TypeVar("Draft", bound=VocabularyDrafter)


def build_draft(kind: type[Draft], target: Target, vocabulary: Tensor, tokenizer: str, **options: Any) -> Draft:
    """A new `kind`, shaped for the target and bound to it, its head started from the target's rows.

    vocabulary: ascending target ids [V_draft]; tokenizer: fingerprint; options: fields of the draft's config
    dataclass. Raises DraftwrightError for an unknown option or one that doesn't fit the target.
    """
    config_kind = get_type_hints(kind.__init__)["config"]
    known = {field.name for field in dataclasses.fields(config_kind)}
    for key in sorted(options.keys() - known):
        raise DraftwrightError(f"there is no config key 'draft.{key}': choose from {', '.join(sorted(known))}")
    config = config_kind.for_target(target.spec, draft_vocab_size=vocabulary.numel(), tokenizer=tokenizer, **options)
    draft = kind(config)
    draft.set_vocabulary(vocabulary)
    draft.init_head(target.head_weight())
    draft.bind(target)
    return draft
