"""Medusa-2 (arXiv:2401.10774, section 2.2.2): the heads and, through LoRA, the target itself learn together.

    loss = L_LM + medusa_weight * sum_k decay^k L_k        L_LM, L_k: cross-entropy on the tokens of the data

The heads read the tuned target's states, so the target runs in the step, with gradient. What is served afterwards is
the tuned target: its output is not that of the target one started from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from data.batch import Batch
from spec_decode.checkpoint import write_folder_atomically
from spec_decode.drafters.medusa import MedusaDraftModel
from spec_decode.target_hf import HFTarget
from train.losses import chunked_head_loss, hard_cross_entropy
from train.medusa import MedusaModule
from train.module import Unrolled


class Medusa2Module(MedusaModule):
    """medusa_weight: share of the heads' loss; lora_rank, lora_lr: of the adapters on all linear layers."""

    shardable = False  # the adapters belong to the target too
    target: HFTarget

    def __init__(
        self,
        draft: MedusaDraftModel,
        target: HFTarget,
        *,
        medusa_weight: float,
        lora_rank: int,
        lora_lr: float,
        **options: Any,
    ) -> None:
        super().__init__(draft, target, **options)
        self.medusa_weight, self.lora_lr = medusa_weight, lora_lr
        config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        self._tuned = [get_peft_model(target.model, config)]  # in a list, so that no checkpoint holds the whole target
        trained = (weight for weight in target.model.parameters() if weight.requires_grad)
        self.adapters = nn.ParameterList(trained)

    def _unrolled(self, batch: Batch) -> Unrolled:
        """With the tuned target's states in place of stored ones."""
        return super()._unrolled(
            dataclasses.replace(batch, last_hidden=batch.packed(self.target.states(batch.padded())))
        )

    def _loss(self, unrolled: Unrolled) -> tuple[Tensor, Tensor]:
        heads, steps = super()._loss(unrolled)
        valid = unrolled.alignment.valid[:1]  # some head predicts each of these tokens
        language, _ = chunked_head_loss(
            unrolled.target_states[None],
            [self.target.head_weight()],
            valid / self._counts(unrolled, valid)[:, None],
            unrolled.target_states.detach(),
            self.target.head_weight(),
            hard_cross_entropy,
            unrolled.tokens,
        )
        return language + self.medusa_weight * heads, steps

    def configure_optimizers(self) -> Any:
        return self._configure(extra=[{"params": list(self.adapters), "lr": self.lora_lr}])

    def export_target(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
        model: Any = self._tuned[0].merge_and_unload()  # type: ignore[operator]

        def write(temporary: Path) -> None:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)

        write_folder_atomically(folder, write)
        return folder
