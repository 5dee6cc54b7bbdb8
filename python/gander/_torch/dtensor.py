"""What DTensors are asked for by files that the rules for DTensor (sharding.py) build on."""

DTensor: type | tuple = ()  # the class once a program has imported it; isinstance(x, ()) is False


def is_dtensor(x) -> bool:
    return isinstance(x, DTensor)


def rows_are_sharded(x) -> bool:
    return isinstance(x, DTensor) and any(map(is_shard, x.placements))


def dimensions_of_classes(x) -> list[int]:
    """The dimensions of the mesh over which the last dimension of a DTensor is sharded."""
    return [dim for dim, placement in enumerate(x.placements) if placement.is_shard(x.ndim - 1)]


def is_shard(placement):
    return not (placement.is_replicate() or placement.is_partial())
