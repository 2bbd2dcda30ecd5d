"""A module that holds one rank's parts of the parameters of another, under their own names.

What the executors of plans and of pipelines share: parts and wholes of tensors that lie like a parameter, a
``state_dict`` of DTensors, so that distributed checkpoints work, and a ``load_state_dict`` that takes DTensors or whole
tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autopar.collectives import MeshGroups, convert
from autopar.placement import Layout, R, local_shape, shard
from autopar.resharding import plan_steps

__all__ = ["ShardedModule", "register"]


class ShardedModule(nn.Module):
    """A module whose parameters and buffers are parts.

    Args:
        groups: This rank's groups along the axes of the mesh the parts lie on.

    Attributes:
        groups: The same, with the bytes they counted.
    """

    def __init__(self, groups: MeshGroups):
        super().__init__()
        self.groups = groups
        self._layouts: dict[str, Layout] = {}
        self._device_mesh: Any = None
        self.register_state_dict_post_hook(_as_dtensors)
        self.register_load_state_dict_pre_hook(_as_shards)

    @property
    def gives_dtensors(self) -> bool:
        """Whether ``state_dict`` gives DTensors: not on one rank."""
        return self.groups.world.size > 1

    def full_tensors(self) -> dict[str, Tensor]:
        """Return every parameter and buffer whole. Collective: all ranks."""
        return {name: self.gather(name, tensor) for name, tensor in self.parts().items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that lies like the parameter ``name`` (a view)."""
        return shard(whole, self._layouts[name], self.groups.mesh, self.groups.coordinate)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Return the whole of a tensor that lies like the parameter ``name``, such as its optimiser state.

        Collective: all ranks.
        """
        layout = self._layouts[name]
        steps = plan_steps(layout, (R,) * len(layout))
        # A copy even where nothing moves, so that the next step of the optimiser does not change it.
        return convert(local.detach().clone(), steps or (), self.groups)

    def parts(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter and buffer, each under all of its names."""
        found: dict[str, Tensor] = dict(self.named_parameters(remove_duplicate=False))
        return found | dict(self.named_buffers(remove_duplicate=False))

    def device_mesh(self) -> Any:
        """Return the mesh as ``torch.distributed`` knows it. Collective: the first call, by all ranks."""
        if self._device_mesh is None:
            self._device_mesh = self._make_device_mesh()
        return self._device_mesh

    def _make_device_mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        names = tuple(f"axis{axis}" for axis in range(len(self.groups.mesh)))
        return init_device_mesh(self.groups.world.device.type, self.groups.mesh, mesh_dim_names=names)


def register(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor under a dotted name, making plain modules on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def _as_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    if not isinstance(module, ShardedModule) or not module.gives_dtensors:
        return
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = module.device_mesh()
    for name, layout in module._layouts.items():
        placements = [Replicate() if form < 0 else Shard(form) for form in layout]
        state[prefix + name] = DTensor.from_local(state[prefix + name].detach(), mesh, placements, run_check=False)


def _as_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not isinstance(module, ShardedModule):
        return
    for name, layout in module._layouts.items():
        if prefix + name not in state:
            continue
        value = state[prefix + name]
        if hasattr(value, "to_local"):
            value = value.to_local()
        elif isinstance(value, Tensor):
            own = module.parts()[name]
            sizes = local_shape(value.shape, layout, module.groups.mesh)
            if value.shape != own.shape and tuple(sizes) == tuple(own.shape):
                value = shard(value, layout, module.groups.mesh, module.groups.coordinate)
        state[prefix + name] = value
