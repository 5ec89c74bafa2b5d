"""Where the arguments lie: which mesh, which of its axes split the tokens and which the table. docs/sharding.md has the
rules in words. All are decided here, when a program is traced."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ._manual import in_shard_map
from ._place import Place

Axes = tuple[str, ...]  # of one dimension of an array, major first


class Layout(NamedTuple):
    """Static and hashable."""

    mesh: Any  # Mesh, or AbstractMesh
    lead: tuple[Axes, ...]  # of each leading dimension of x; the hidden one is not split
    w: tuple[Axes, Axes]
    place: Place

    @property
    def tokens_spec(self) -> PartitionSpec:
        return PartitionSpec(*self.lead)

    @property
    def x_spec(self) -> PartitionSpec:
        return PartitionSpec(*self.lead, None)

    @property
    def w_spec(self) -> PartitionSpec:
        return PartitionSpec(*self.w)

    @property
    def ids_spec(self) -> PartitionSpec:
        """Of an array by id."""
        return PartitionSpec(tuple(axis for axis, _ in self.place.ids))

    def missing(self, lead: tuple[int, ...]) -> list[int]:
        """How much each leading dimension of x lacks to a multiple of its devices."""
        sizes = dict(self.mesh.shape)
        return [-extent % math.prod(sizes[axis] for axis in axes) for extent, axes in zip(lead, self.lead)]

    @property
    def explicit(self) -> bool:
        return AxisType.Explicit in (self.mesh.axis_types or ())


def find(x: Any, w: Any, *, head_layout: str, mesh: Any = None, x_spec: Any = None,
         w_spec: Any = None) -> Layout | None:
    """The layout of x [..., D] and w, or None where both are on one device, or it cannot be told how they lie."""
    asked = mesh is not None or x_spec is not None or w_spec is not None
    if in_shard_map():
        if asked:
            raise ValueError("mesh, x_spec and w_spec are for arguments that are whole: inside shard_map they are the "
                             "device's own parts. Leave them out, or call linear_cross_entropy outside shard_map")
        return None
    seen_x, seen_w = _sharding(x), _sharding(w)
    mesh = _mesh(mesh, seen_x, seen_w)
    if mesh is None:
        if asked:
            raise ValueError("x_spec and w_spec name the axes of a mesh, and there is none: pass mesh=, or call under "
                             "jax.set_mesh(mesh) or `with mesh:`")
        return None
    sizes = dict(mesh.shape)
    in_x = _axes("x_spec", x_spec, x.ndim, sizes) if x_spec is not None else _seen("x", x, seen_x, mesh)
    in_w = _axes("w_spec", w_spec, 2, sizes) if w_spec is not None else _seen("w", w, seen_w, mesh)
    if in_w is None:
        if asked:
            raise ValueError("w_spec: inside jit it cannot be seen how w is split over the mesh; pass its "
                             "PartitionSpec, such as w_spec=PartitionSpec('tp', 'fsdp')")
        return None
    if not asked and (math.prod(sizes.values()) == 1 or not (any(in_w) or any(in_x or ()))):
        return None
    layout = assign(sizes, x.shape[:-1], w.shape, None if in_x is None else in_x[:-1], in_w, head_layout)
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else getattr(mesh, "abstract_device", None)
    chip = getattr(device, "device_kind", "") or ""
    return layout._replace(mesh=mesh, place=layout.place._replace(chip=chip))


def assign(sizes: dict[str, int], lead: tuple[int, ...], w_shape: tuple[int, int], in_x: tuple[Axes, ...] | None,
           in_w: tuple[Axes, Axes], head_layout: str) -> Layout:
    """Gives each axis of the mesh its role.

    An axis that splits the table's ids and not the tokens gets a share of the vocabulary. Every other one gets tokens,
    also if tokens were the same along it: else its devices would all compute the same.
    """
    id_axis = 0 if head_layout == "vd" else 1
    used = [_dividing(w_shape[i], in_w[i], sizes) for i in (0, 1)]
    ids, hidden = used[id_axis], used[1 - id_axis]
    if in_x is None:  # where the batch goes beside such a table
        in_x = (tuple(a for a in sizes if a not in ids),) + ((),) * (len(lead) - 1)
    tokens = [tuple(a for a in axes if sizes[a] > 1) for axes in in_x]
    taken = {a for axes in tokens for a in axes} | set(ids)
    free = tuple(a for a, size in sizes.items() if size > 1 and a not in taken)
    if free:
        k = _roomiest(lead, tokens, free, sizes)
        tokens[k] += free
    place = Place(
        token_axes=tuple(a for axes in tokens for a in axes),
        ids=tuple((a, sizes[a]) for a in ids),
        hidden_parts=tuple((a, sizes[a]) for a in hidden),
    )
    return Layout(None, tuple(tokens), (used[0], used[1]), place)


def _dividing(extent: int, axes: Axes, sizes: dict[str, int]) -> Axes:
    """The leading axes whose product divides the extent: JAX has no arrays of unequal parts."""
    kept: Axes = ()
    parts = 1
    for axis in axes:
        parts *= sizes[axis]
        if extent % parts:
            break
        kept += (axis,) if sizes[axis] > 1 else ()
    return kept


def _roomiest(lead: tuple[int, ...], tokens: list[Axes], free: Axes, sizes: dict[str, int]) -> int:
    """The leading dimension that takes more axes with the least padding."""
    def padded(k: int) -> int:
        parts = math.prod(sizes[a] for a in tokens[k] + free)
        return -(-lead[k] // parts) * parts * math.prod(lead[:k] + lead[k + 1 :])

    return min(range(len(lead)), key=padded)


# ------------------------------------------------------------------------------------------------ looking at arguments


def _sharding(array: Any) -> Any:
    """The array's NamedSharding; None where it has another, or where tracing hides it."""
    if isinstance(array, jax.core.Tracer):
        known = jax.typeof(array).sharding
        if AxisType.Explicit in (known.mesh.axis_types or ()):
            return known
        concrete = _concrete(array)
        return None if concrete is None else _sharding(concrete)
    known = getattr(array, "sharding", None)
    return known if isinstance(known, NamedSharding) else None


def _concrete(array: Any) -> Any:
    """The array behind a tracer of jax.grad outside jit; None inside jit."""
    if not isinstance(array, jax.core.Tracer):
        return array
    return getattr(array, "to_concrete_value", lambda: None)()


def _mesh(given: Any, *seen: Any) -> Any:
    if given is not None:
        if not hasattr(given, "axis_names") or not hasattr(given, "shape"):
            raise TypeError(f"mesh: got {type(given).__name__}, a jax.sharding.Mesh is needed")
        return given
    for sharding in seen:
        if sharding is not None:
            return sharding.mesh
    current = jax.sharding.get_abstract_mesh()  # jax.set_mesh
    if not current.empty:
        return current
    try:
        from jax.interpreters import pxla  # `with mesh:`, which Tunix uses; deprecated, with no other way to ask for it

        current = pxla.thread_resources.env.physical_mesh
    except (ImportError, AttributeError):
        return None
    return None if current.empty else current


def _seen(name: str, array: Any, sharding: Any, mesh: Any) -> tuple[Axes, ...] | None:
    if sharding is not None:
        same = dict(sharding.mesh.shape) == dict(mesh.shape)
        return _axes(name, sharding.spec, array.ndim, dict(mesh.shape)) if same else None
    concrete = _concrete(array)
    return None if concrete is None or getattr(concrete, "committed", False) else ((),) * array.ndim


def _axes(name: str, spec: Any, ndim: int, sizes: dict[str, int]) -> tuple[Axes, ...]:
    if not isinstance(spec, (PartitionSpec, tuple)):
        raise TypeError(f"{name}: got {type(spec).__name__}, a jax.sharding.PartitionSpec is needed")
    if len(spec) > ndim:
        raise ValueError(f"{name}: {spec} has {len(spec)} entries for an array of {ndim} axes")
    entries = [() if e is None or e is PartitionSpec.UNCONSTRAINED else e if isinstance(e, tuple) else (e,)
               for e in spec]
    names = [axis for entry in entries for axis in entry]
    for axis in names:
        if axis not in sizes:
            raise ValueError(f"{name}: {axis!r} is no axis of the mesh, which has {', '.join(map(repr, sizes))}")
        if names.count(axis) > 1:
            raise ValueError(f"{name}: {spec} names {axis!r} twice")
    return tuple(entries) + ((),) * (ndim - len(entries))
