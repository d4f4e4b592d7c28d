import math
import types
from collections.abc import Iterable, Mapping, Sequence

import equinox as eqx
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ._errors import MeshError


class MeshSpec(eqx.Module):
    """A mesh as a value: named axes with sizes, and no devices.

    Everything that plans takes one of these, so a laptop can plan for a pod of 65,536 chips. A mesh of real
    devices is made from it by [`shardfx.MeshSpec.build`][].

    !!! Example

        ```python
        from shardfx import MeshSpec

        mesh = MeshSpec({"data": -1, "tensor": 4}).fit(32)
        assert dict(mesh.shape) == {"data": 8, "tensor": 4}
        assert mesh == MeshSpec.parse("data=8,tensor=4")
        ```
    """

    axis_names: tuple[str, ...] = eqx.field(static=True)
    axis_sizes: tuple[int, ...] = eqx.field(static=True)
    axis_types: tuple[AxisType, ...] = eqx.field(static=True)
    dcn_sizes: tuple[int, ...] = eqx.field(static=True)

    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]],
        *,
        axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
        dcn: Mapping[str, int] | None = None,
    ):
        """**Arguments:**

        - `axes`: mapping or pairs from axis name to size, slowest axis first. One size may be -1: see
            [`shardfx.MeshSpec.fit`][].
        - `axis_types`: one `jax.sharding.AxisType` for all axes, or a mapping; axes that it leaves out are Auto.
        - `dcn`: how many slices (TPU) or nodes (GPU) an axis spans over the slow network; 1 where not given.

        **Raises:**

        `MeshError` for a repeated axis, a size that is neither positive nor -1, two sizes of -1, or a
        `dcn` entry that does not divide its axis.
        """
        pairs = tuple(axes.items() if isinstance(axes, Mapping) else axes)
        self.axis_names = tuple(name for name, _ in pairs)
        self.axis_sizes = tuple(size for _, size in pairs)
        kinds = axis_types if isinstance(axis_types, Mapping) else dict.fromkeys(self.axis_names, axis_types)
        self.axis_types = tuple(kinds.get(name, AxisType.Auto) for name in self.axis_names)
        self.dcn_sizes = tuple((dcn or {}).get(name, 1) for name in self.axis_names)
        for given, what in ((kinds, "axis_types"), (dcn or {}, "dcn")):
            _require_known(given, self.axis_names, what)

    def __check_init__(self):
        repeated = [name for name in self.axis_names if self.axis_names.count(name) > 1]
        if repeated:
            raise MeshError(f"mesh axis `{repeated[0]}` occurs twice in {self.axis_names}; give each axis one name.")
        for name, size, slices in zip(self.axis_names, self.axis_sizes, self.dcn_sizes, strict=True):
            if not isinstance(name, str) or not name:
                raise MeshError(f"a mesh axis must be named by a non-empty string, not {name!r}.")
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or (size < 1 and size != -1):
                raise MeshError(f"mesh axis `{name}` has size {size!r}; use a positive integer, or -1 for the rest.")
            if not isinstance(slices, int | np.integer) or slices < 1 or (size != -1 and size % slices):
                raise MeshError(
                    f"mesh axis `{name}` of size {size} cannot span {slices!r} slices; `dcn` must divide the size."
                )
        unknown = [name for name, size in zip(self.axis_names, self.axis_sizes, strict=True) if size == -1]
        if len(unknown) > 1:
            raise MeshError(f"mesh axes {unknown} are both -1; at most one size can be filled from the device count.")

    @classmethod
    def parse(cls, text: str, *, axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto) -> "MeshSpec":
        """Reads `"data=-1,fsdp=4,tensor=2"`; spaces are allowed round names and sizes.

        **Arguments:**

        - `text`: `name=size` pairs joined by commas, slowest axis first.
        - `axis_types`: as in `MeshSpec(...)`.

        **Returns:**

        The mesh.

        **Raises:**

        `MeshError` that names the part that is no `name=size`.
        """
        pairs = []
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not (name and equals and _is_integer(size)):
                raise MeshError(
                    f"mesh {text!r}: {part.strip()!r} is not of the form `name=size`; "
                    'write it as in "data=-1,fsdp=4,tensor=2".'
                )
            pairs.append((name, int(size)))
        return cls(pairs, axis_types=axis_types)

    @classmethod
    def of(cls, mesh: "Mesh | AbstractMesh | MeshSpec") -> "MeshSpec":
        """The MeshSpec of a `jax.sharding.Mesh` or `AbstractMesh`; its axis types are kept.

        **Arguments:**

        - `mesh`: any mesh; a MeshSpec comes back as it is.

        **Returns:**

        The mesh without its devices, every axis within one slice (`dcn` is not recorded in JAX meshes).
        """
        if isinstance(mesh, MeshSpec):
            return mesh
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise MeshError(
                f"expected a MeshSpec, a jax Mesh or an AbstractMesh, not {type(mesh).__name__}; "
                'make one with `MeshSpec({"data": 4, "tensor": 2})`.'
            )
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        return cls(mesh.shape.items(), axis_types=types)

    @property
    def shape(self) -> Mapping[str, int]:
        """Axis name to size, in order; read-only."""
        return types.MappingProxyType(dict(zip(self.axis_names, self.axis_sizes, strict=True)))

    @property
    def size(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self._filled().axis_sizes)

    def fit(self, device_count: int) -> "MeshSpec":
        """Fills the axis of size -1 so that the mesh has `device_count` devices.

        **Arguments:**

        - `device_count`: how many devices there are.

        **Returns:**

        A MeshSpec without -1, of exactly `device_count` devices.

        **Raises:**

        `MeshError` if the known sizes do not divide `device_count`, or, without a -1, do not give it.
        """
        known = math.prod(size for size in self.axis_sizes if size != -1)
        if -1 not in self.axis_sizes and known != device_count:
            raise MeshError(
                f"mesh {self} has {known} devices, but there are {device_count}; "
                f"give one axis the size -1 to let it take the rest."
            )
        if device_count % known or device_count < 1:
            raise MeshError(
                f"mesh {self}: the known sizes give {known}, which does not divide {device_count} devices; "
                f"use sizes whose product divides {device_count}."
            )
        return self._with_sizes(tuple(device_count // known if size == -1 else size for size in self.axis_sizes))

    def axis_size(self, names: str | Sequence[str]) -> int:
        """The size of one axis, or the product of several.

        **Arguments:**

        - `names`: an axis name or a sequence of different ones; `()` gives 1.

        **Returns:**

        How many pieces a dimension sharded over `names` is cut into.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        if not all(isinstance(name, str) for name in names):
            raise MeshError(f"mesh axes are named by strings, not by {names!r}.")
        _require_known(names, self.axis_names, "axis_size")
        if len(set(names)) < len(names):
            raise MeshError(f"an axis occurs twice in {names}; a dimension can use each mesh axis once.")
        return math.prod(self._filled().shape[name] for name in names)

    def abstract(self) -> AbstractMesh:
        """The `jax.sharding.AbstractMesh` of the same axes: enough to trace and lower with, no devices."""
        return AbstractMesh(self._filled().axis_sizes, self.axis_names, axis_types=self.axis_types)

    def _filled(self) -> "MeshSpec":
        if -1 in self.axis_sizes:
            raise MeshError(f"mesh {self} has an axis of unknown size; call `.fit(device_count)` first.")
        return self

    def _with_sizes(self, sizes: tuple[int, ...]) -> "MeshSpec":
        return MeshSpec(
            zip(self.axis_names, sizes, strict=True),
            axis_types=dict(zip(self.axis_names, self.axis_types, strict=True)),
            dcn=dict(zip(self.axis_names, self.dcn_sizes, strict=True)),
        )

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.axis_names, self.axis_sizes, strict=True))


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isdecimal() and text.count("-") <= 1


def _require_known(names: Iterable[str], axis_names: tuple[str, ...], what: str) -> None:
    for name in names:
        if name not in axis_names:
            raise MeshError(f"`{what}` names mesh axis `{name}`, but the mesh has {axis_names}; use one of those.")
