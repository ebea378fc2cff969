"""FSDP (arXiv:2304.11277): each process keeps one part of every weight, gradient and moment of the draft.

torch's `fully_shard` cuts a weight [A, B] into rows, [A / processes, B] each, as a DTensor, which optimisers and norms
treat as the whole. The draft is one unit: whole weights exist from the start of a step to the end of its backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from spec_decode.drafter import VocabularyDrafter
from spec_decode.target import Target

Draft = TypeVar("Draft", bound=VocabularyDrafter)
_WHOLE = StateDictOptions(full_state_dict=True)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for `fully_shard`, over all processes, with the checkpoints of every other strategy.

    Its own way to load one takes the optimiser's parameters to be in the module's order; here they are in that of the
    optimiser's groups, as torch saves them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        set_model_state_dict(self.lightning_module, dict(checkpoint["state_dict"]), options=_WHOLE)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            of = dict(zip(numbers, parameters, strict=True))
            state = {
                number: {name: _shard_like(of[number], value) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def _shard_like(parameter: Tensor, value: Any) -> Any:
    """What an optimiser keeps for a sharded parameter: its moments sharded alike, its step count as it is."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def shard(module: LightningModule) -> None:
    """Shard the module's weights over the processes of a ShardedStrategy, once.

    Steps don't go through `forward`, where torch would make weights whole, so they are named.
    """
    if module.device_mesh is None or isinstance(module, FSDPModule):
        return
    fully_shard(module, mesh=module.device_mesh["data_parallel"])
    for step in ("training_step", "validation_step"):
        register_fsdp_forward_method(module, step)


def whole(module: LightningModule, draft: Draft, target: Target) -> Draft:
    """The module's draft with whole weights, for which all processes ask together: itself unless it is sharded."""
    if not isinstance(module, FSDPModule):
        return draft
    copy = type(draft)(draft.config)
    copy.load_state_dict(get_model_state_dict(draft, options=_WHOLE), assign=True)  # keeps dtype and device
    copy.bind(target)
    return copy.to(module.device)


def gradient_norm(module: nn.Module) -> Tensor:
    """The norm of the whole gradient, which all processes ask for together."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
