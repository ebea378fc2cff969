"""Logits of every unrolled step as the speculators library computes them. Runs in .venv-vllm, called by
benchmarks/parity/speculators_table.py.

python benchmarks/parity/speculators_forward.py EXPORTED INPUTS.safetensors OUT.safetensors STEPS

INPUTS: features [T, taps * H] and the tokens after each row, next_ids [T]. OUT: logits [STEPS, T, V_draft], fp32.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from torch import Tensor


@torch.inference_mode()
def main(exported: str, inputs: str, out: str, steps: int) -> None:
    given = load_file(inputs)
    config = SpeculatorModelConfig.from_pretrained(exported)
    config.transformer_layer_config._attn_implementation = "eager"  # its own choice is compiled for GPUs
    model = SpeculatorModel.from_pretrained(exported, config=config).float().eval()
    model.load_verifier_weights()
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    length = given["next_ids"].numel()
    model(
        hidden_states=given["features"][None],
        input_ids=given["next_ids"][None],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        position_ids=torch.arange(length)[None],
        ttt_steps=steps,
    )
    save_file({"logits": torch.stack(logits)}, out)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
