"""Tunix shards the batch over the mesh of `with mesh:` and over no other; this sees where it silently would not."""

from __future__ import annotations

import math


def tunix_mesh():
    """Returns the mesh Tunix sees, that of `with mesh:`; it may be empty."""
    from jax.interpreters import pxla

    return pxla.thread_resources.env.physical_mesh


def current_mesh():
    """Returns the mesh the step is traced under, of `with mesh:` or `jax.set_mesh`, or None if that is one device."""
    import jax

    mesh = tunix_mesh()
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    return None if mesh.empty or mesh.size == 1 else mesh


def layout(shape: tuple[int, int], spec, data_sharding_axis: tuple) -> dict:
    """Returns the arguments by which `linear_cross_entropy` knows how [B, L, D] hidden states and the head lie.

    A tracer does not say how its array is split. The model's metadata do (`spec`), and the batch [B, L] is split the way
    Tunix splits it. A spec that turns out not to be true costs a resharding, never the result.
    """
    from jax.sharding import PartitionSpec

    mesh = current_mesh()
    if mesh is None or spec is None:
        return {}
    sizes = dict(mesh.shape)
    split = [_known(axes, sizes) for axes in data_sharding_axis[:2]]
    # Tunix splits an array along all of these dimensions or along none.
    whole = any(extent % _parts(axes, sizes) for extent, axes in zip(shape, split, strict=False))
    return {
        "mesh": mesh,
        "w_spec": PartitionSpec(*(_known(axes, sizes) for axes in spec)),
        "x_spec": PartitionSpec(*(() if whole else split)),
    }


def _known(axes, sizes):
    """The axes of one dimension that the mesh has: Tunix's metadata name fsdp and tp on any mesh."""
    names = () if axes is None else axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(name for name in names if name in sizes) or None


def _parts(axes, sizes) -> int:
    return math.prod(sizes[name] for name in axes or ())


def unseen_mesh(model) -> str | None:
    """Returns what to tell the user if the model spans devices but Tunix will not shard the batch, else None."""
    import jax
    from flax import nnx

    if not tunix_mesh().empty:
        return None
    devices = max((len(a.sharding.device_set) for a in jax.tree.leaves(nnx.state(model)) if isinstance(a, jax.Array)),
                  default=1)  # fmt: skip
    if jax.sharding.get_abstract_mesh().size > 1:
        seen = "the mesh was set by jax.set_mesh"
    elif devices > 1:
        seen = f"the model's weights are on {devices} devices"
    else:
        return None
    return (
        f"{seen}, but Tunix shards the batch over the mesh of `with mesh:` only: every device will compute the whole "
        "batch. Call train() inside `with mesh:`."
    )


def undivided_batch(rows: int, data_sharding_axis: tuple) -> str | None:
    """Returns what to tell the user if Tunix will give every device all `rows` of the batch, else None."""
    sizes = dict(tunix_mesh().shape)
    axes = _known(data_sharding_axis[0] if data_sharding_axis else None, sizes)
    shards = _parts(axes, sizes)
    if rows % shards == 0:
        return None
    return (
        f"a batch of {rows} rows cannot be split over the {shards} devices of mesh axis {', '.join(map(repr, axes))}: "
        f"Tunix gives every device all of it. Make the batch a multiple of {shards} rows."
    )
