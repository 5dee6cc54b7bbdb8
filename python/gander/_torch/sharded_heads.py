"""The operands of a column-parallel head: a weight that is a DTensor, and whose classes are sharded.

Each rank multiplies all rows with its classes. So the gradient of the rows is a partial sum, which DTensor
reduces where the rows were made.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .dtensor import is_dtensor
from .refusals import refuse_transforms
from .slice_plan import chunks


class Slices(NamedTuple):
    """The ranks that share the classes."""

    mesh: DeviceMesh
    group: ProcessGroup
    sizes: tuple[int, ...]  # the number of classes of each rank

    def whole(self, result: Tensor) -> DTensor:
        """A result that is the same on all ranks."""
        return DTensor.from_local(result, self.mesh, [Replicate()], run_check=False)


def parts(function, name, x, weight, bias, others):
    """The ranks, and this rank's part of x, weight, bias and the others, which are by name. Refuses other
    placements. function: the public one. name: that of x."""
    mesh, by_class, replicated = weight.device_mesh, (Shard(0),), (Replicate(),)
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"weight is on {mesh}, expected a mesh of one dimension, over which its classes are sharded; "
            "distribute it on a slice of the mesh"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"weight is on {mesh}, expected a mesh of which this process is a member")
    _check_placements("weight", weight, weight, by_class)
    for argument, value, placements in (name, x, replicated), ("bias", bias, by_class):
        if value is not None and not is_dtensor(value):
            placement = "Replicate()" if placements == replicated else "Shard(0)"
            raise TypeError(
                f"{argument} is a plain tensor, expected a DTensor with placements {placements} like weight; "
                f"pass DTensor.from_local({argument}, mesh, [{placement}]), or weight.full_tensor() if FSDP2 "
                "has sharded it"
            )
        _check_placements(argument, value, weight, placements)
    for argument, value in others.items():  # a plain tensor is the same on all ranks
        _check_placements(argument, value, weight, replicated)
    refuse_transforms("weight is a DTensor", function)
    return (
        Slices(mesh, mesh.get_group(), tuple(chunks(weight.shape[0], mesh.size()))),
        x.to_local(grad_placements=[Partial()]),
        weight.to_local(),
        *(value.to_local() if is_dtensor(value) else value for value in (bias, *others.values())),
    )


def _check_placements(name, value, weight, expected):
    if not is_dtensor(value):
        return
    if value.device_mesh != weight.device_mesh:
        raise ValueError(
            f"{name} is on {value.device_mesh}, expected {weight.device_mesh}, the mesh of weight; "
            "distribute it there"
        )
    # A strided shard is another class, and equal to none of these. Dynamo of torch 2.10 cannot compare types.
    strided = not torch.compiler.is_compiling() and type(value.placements[0]) is not type(expected[0])
    if (*value.placements,) != expected or strided:
        raise NotImplementedError(
            f"{name} has placements {value.placements}, expected {expected} with a weight whose classes are "
            "sharded; redistribute it"
        )
