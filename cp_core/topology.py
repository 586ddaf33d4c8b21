"""All process groups of a run, taken from the ``DeviceMesh`` once, at bind time.

"axis" means a mesh axis. A mesh may have any of the axes ``pp, dp_replicate, dp_shard, cp, tp``. Data ranks are
``dp = dp_replicate x dp_shard``; parameters are sharded over ``dp_shard x cp``; gradients and router statistics are
summed over ``dp x cp``. Flattened and split axes are made here and nowhere else, so no forward ever makes a group.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_NOT_YET = ("pp", "tp")
_split: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[Axis, Axis]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Axis:
    """One (possibly flattened) axis as this rank sees it. ``group`` is None when ``size`` is 1, and in dry runs."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: object) -> Axis:
        """Itself: a copy of a model (such as an average of weights) talks over the same groups."""
        return self

    def __reduce__(self) -> tuple[type[Axis], tuple[int, int]]:
        """Sent to another process, it keeps its numbers (a report's costs need them) and loses its group."""
        return Axis, (self.size, self.rank)


@dataclass(frozen=True)
class Topology:
    """The axes that the core needs, and the mesh over which FSDP2 shards (None for one process)."""

    mesh: DeviceMesh | None = None
    cp: Axis = Axis()
    dp: Axis = Axis()
    dp_cp: Axis = Axis()
    fsdp_mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: object) -> Topology:
        """Itself; see ``Axis``."""
        return self

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh | None) -> Topology:
        """Read the axes of ``mesh``; collective (every rank of the mesh calls it), the first time only.

        Args:
            mesh: any of the axes in ``AXES``; None means one process.

        Raises:
            ValueError: an axis without a name or with an unknown one, or one that this version cannot use.
        """
        if mesh is None:
            return cls()
        names = check_axes(mesh)
        sharded = tuple(name for name in ("dp_shard", "cp") if name in names)
        fsdp_mesh = _submesh(mesh, sharded)
        if fsdp_mesh is not None and "dp_replicate" in names and mesh["dp_replicate"].size() > 1:
            # [replicas, shards]; a mesh made of two has no public form in torch 2.13
            fsdp_mesh = DeviceMesh._concatenate([mesh["dp_replicate"], fsdp_mesh])
        return cls(
            mesh=mesh,
            cp=_axis(_submesh(mesh, ("cp",))),
            dp=_axis(_submesh(mesh, ("dp_replicate", "dp_shard"))),
            dp_cp=_axis(_submesh(mesh, ("dp_replicate", "dp_shard", "cp"))),
            fsdp_mesh=fsdp_mesh,
        )

    def split_cp(self, degree: int) -> tuple[Axis, Axis]:
        """The cp axis as ``degree`` adjacent ranks (inner) times the groups of them (outer): ``P = C x U``.

        Collective the first time a degree is asked for; then cached with the cp group, so that layers and models
        share groups. Without groups (a dry run) nothing is made.

        Args:
            degree: U; divides the cp size.

        Returns:
            The inner axis of U ranks and the outer axis of C.
        """
        size, rank = self.cp.size, self.cp.rank
        if self.cp.group is None:
            return Axis(degree, rank % degree), Axis(size // degree, rank // degree)
        known = _split.setdefault(self.cp.group, {})
        if degree not in known:
            mesh = cp_submesh(self.mesh)
            assert mesh is not None
            # the public form, init_device_mesh, knows no other data ranks; torch 2.13 has no public split
            pair = mesh._unflatten(0, (size // degree, degree), ("cp_co", "cp_ulysses"))
            known[degree] = _axis(pair["cp_ulysses"]), _axis(pair["cp_co"])
        return known[degree]


def check_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes, all known and usable.

    Raises:
        ValueError: see ``Topology.from_mesh``.
    """
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(f"the mesh needs axis names (mesh_dim_names), some of: {', '.join(AXES)}")
    for name in names:
        if name not in AXES:
            hint = "; for data parallelism write 'dp_shard' or 'dp_replicate'" if name.startswith("dp") else ""
            raise ValueError(f"mesh axis {name!r} is not one of {', '.join(AXES)}{hint}")
        if name in _NOT_YET and mesh[name].size() > 1:
            raise ValueError(
                f"mesh axis {name!r} of size {mesh[name].size()}: not available in this version; use size 1"
            )
    if list(names) != sorted(names, key=AXES.index):
        raise ValueError(f"mesh axes {', '.join(names)} stand in another order than {', '.join(AXES)}")
    return tuple(names)


def cp_submesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The cp axis of a mesh that has one (or is one, whatever its name); None where the cp size is 1.

    Raises:
        ValueError: a mesh of several unnamed axes.
    """
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    if "cp" in names:
        mesh = mesh["cp"]
    elif mesh.ndim != 1 or any(name in AXES for name in names):
        check_axes(mesh)
        return None  # a mesh of known axes, none of them cp
    return mesh if mesh.size() > 1 else None


def _submesh(mesh: DeviceMesh, wanted: tuple[str, ...]) -> DeviceMesh | None:
    """The part of ``mesh`` with those axes of ``wanted`` that it has, flattened to one; None if it has none."""
    present = tuple(name for name in wanted if name in (mesh.mesh_dim_names or ()))
    if not present:
        return None
    if len(present) == 1:
        return mesh[present[0]]
    return mesh[present]._flatten("_".join(present))  # no public form exists in torch 2.13


def _axis(mesh: DeviceMesh | None) -> Axis:
    if mesh is None or mesh.size() == 1:
        return Axis()
    return Axis(size=mesh.size(), rank=mesh.get_local_rank(), group=mesh.get_group())
