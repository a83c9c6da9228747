"""`save_dmp` and `load_dmp`: a job with a TorchRec DistributedModelParallel, with the moments of all its optimizers.

    optimizer = make_dmp_optimizer(model, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    values = load_dmp(folder, model, optimizer)  # None: there is no checkpoint
    if values is not None:
        loader.load_state_dict(values["data"])
    ...
    save_dmp(folder, model, optimizer, {"data": loader.state_dict(after=batch), "step": step})

torch.distributed.checkpoint loads into what is there, so the moments of an optimizer that has not stepped would be lost
in silence; and it saves hyperparameters, such as a learning rate that a schedule has changed, only where it is asked.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.optim import Optimizer
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from evenrank.core.errors import ConfigError, DataError, StateError, one_line
from evenrank.dataloader.balance.ranks.agree import compare_settings
from evenrank.dataloader.routing.remap import naming_checkpoint


def make_dmp_optimizer(
    model: DistributedModelParallel, dense: Callable[[list[Tensor]], Optimizer]
) -> CombinedOptimizer:
    """Return an optimizer of all parameters, whose state is keyed by the names of the parameters.

    Args:
        model: whose sharded tables are updated during backward; stepping passes their learning rate on.
        dense: makes the optimizer of all other parameters, as `lambda parameters: Adam(parameters, lr=1e-3)`.
    """
    others = dict(in_backward_optimizer_filter(model.named_parameters()))
    return CombinedOptimizer([model.fused_optimizer, KeyedOptimizerWrapper(others, dense)])


def save_dmp(
    folder: Path | str, model: DistributedModelParallel, optimizer: KeyedOptimizer, values: Mapping[str, Any]
) -> None:
    """Replace the checkpoint in a folder that all ranks can write; the earlier one stays until the new one is complete.

    Collective: every rank of the job must call this.

    Args:
        optimizer: of all parameters: that of `make_dmp_optimizer`, or another KeyedOptimizer.
        values: what else to save, the same on all ranks, such as the loader's state and the step, as JSON has it.

    Raises:
        ConfigError: the optimizer lacks parameters, or their names.
        DataError: the checkpoint cannot be written.
        RankError: another rank failed, or has other values.
    """
    path, text = Path(folder), ""
    partial, old = path.with_name(f"{path.name}.partial"), _old(path)

    def begin() -> dict[str, Any]:
        nonlocal text
        _check(model, optimizer)
        try:
            text = json.dumps(values)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"values are not JSON ({one_line(error)}); pass numbers, texts, lists and dicts"
            ) from error
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # of a job that was killed
        return {"the hash of values": hashlib.sha256(text.encode()).hexdigest()[:12]}

    def end() -> dict[str, Any]:
        if dist.get_rank() == 0:
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)  # which is loaded if the job is killed here
            partial.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        return {}

    compare_settings(begin, dist.group.WORLD)
    with naming_checkpoint(DataError, f"{path} cannot be written", "check its space and its permissions"):
        save_checkpoint(_state_of(model, optimizer, text), checkpoint_id=partial)
        compare_settings(end, dist.group.WORLD)


def load_dmp(folder: Path | str, model: DistributedModelParallel, optimizer: KeyedOptimizer) -> dict[str, Any] | None:
    """Continue with the model and the optimizer that `save_dmp` saved, on any number of ranks; return its values.

    None if there is no checkpoint. Collective: every rank of the job must call this.

    Raises:
        ConfigError: the optimizer lacks parameters, or their names.
        StateError: the checkpoint is damaged, or of another model or optimizer.
        RankError: another rank failed.
    """
    path = Path(folder)
    compare_settings(lambda: _check(model, optimizer), dist.group.WORLD)
    found = [next((each for each in (path, _old(path)) if each.exists()), None)]
    dist.broadcast_object_list(found)  # as rank 0 sees it
    if (existing := found[0]) is None:
        return None
    state: dict[str, Any] = {}

    def prepare() -> dict[str, Any]:
        _init_moments(model, optimizer, FileSystemReader(existing).read_metadata().state_dict_metadata)
        state.update(_state_of(model, optimizer))
        return {}

    def restore() -> dict[str, Any]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict({"state": state["optimizer"]})
        for name, group in _groups(optimizer).items():
            group.update(state["groups"][name])
        optimizer.zero_grad()  # also passes learning rates on to sharded tables
        state["values"] = json.loads(state["values"])
        return {}

    remedy = "load one that save_dmp wrote, of this model and optimizer"
    with naming_checkpoint(StateError, f"{existing} cannot be loaded", remedy):
        compare_settings(prepare, dist.group.WORLD)
        # Without this planner, a rank that has no part of a sharded table expects a checkpoint of PyTorch 2.3.
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
        load_checkpoint(state, checkpoint_id=existing, planner=planner)
        compare_settings(restore, dist.group.WORLD)
    values: dict[str, Any] = state["values"]
    return values


def _check(model: DistributedModelParallel, optimizer: KeyedOptimizer) -> dict[str, Any]:
    remedy = "pass make_dmp_optimizer(model, lambda parameters: torch.optim.Adam(parameters))"
    if not isinstance(optimizer, KeyedOptimizer):
        raise ConfigError(f"the optimizer, a {type(optimizer).__name__}, has no names of parameters; {remedy}")
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if missing := [name for name in trained if name not in optimizer.params]:
        raise ConfigError(f"the optimizer lacks {missing[0]}; {remedy}")
    return {}


def _init_moments(model: DistributedModelParallel, optimizer: KeyedOptimizer, saved: Mapping[str, Any]) -> None:
    """Give the parameters of an optimizer that has not stepped the moments that were saved, whatever their values."""
    parts = [part for _, part in optimizer.optimizers] if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    for part in parts:
        if part is not model.fused_optimizer and not part.state:
            part.init_state()
            moments: Any = part.state  # a dict, whatever its annotation says
            for name, parameter in part.params.items():
                if not any(key.startswith(f"optimizer.{name}.") for key in saved):  # of parameters without gradients
                    moments.pop(parameter, None)


def _state_of(model: DistributedModelParallel, optimizer: KeyedOptimizer, values: str = "") -> dict[str, Any]:
    """Return what to save and, before loading, where to load it, by names that are the same on every rank."""
    groups = {
        name: {key: value for key, value in group.items() if key != "params"}
        for name, group in _groups(optimizer).items()
    }
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "groups": groups,
        "values": values,
    }


def _groups(optimizer: KeyedOptimizer) -> dict[str, dict[str, Any]]:
    """Return the groups of hyperparameters by the names of their parameters: ranks may have parts of other tables."""
    names = {parameter: name for name, parameter in optimizer.params.items()}
    return {" ".join(sorted(names[each] for each in group["params"])): group for group in optimizer.param_groups}


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")
