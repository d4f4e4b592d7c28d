"""`MeshSpec`: a mesh as a value, with named axes and sizes, and without devices."""

import functools as ft
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
from jax.sharding import AbstractMesh, AxisType, Mesh

from .._ground.errors import MeshError, check_type, of_argument, whole_number
from .._ground.misuse import called, lacking, refused
from .._ground.told import ToldType
from ._axes import (
    ATTRIBUTES,
    as_int,
    check_axes,
    parsed_axes,
    require_known,
    size_of_axis,
    slices_of_parts,
)
from ._devices import Devices, listed
from ._order import DeviceOrder, device_order


_EMULATE = (
    ' To emulate them on CPU: `jax.config.update("jax_num_cpu_devices", {})` before the'
    " first use of JAX."
)


class MeshSpec(eqx.Module, metaclass=ToldType):
    """A mesh as a value: named axes with sizes, and no devices.

    A laptop can thus plan for a pod of 65,536 chips. [`shardfx.MeshSpec.build`][] makes
    a mesh of devices. Each field has an entry for each axis; the entry in `dcn_sizes`
    is the number of slices that the axis spans.

    !!! Example

        ```python
        from shardfx import MeshSpec

        mesh = MeshSpec({"data": -1, "tensor": 4}).fit(32)
        assert dict(mesh.shape) == {"data": 8, "tensor": 4}
        assert mesh == MeshSpec.parse("data=8,tensor=4")
        ```
    """

    __module__ = "shardfx"
    _told = "no mesh of devices: write `spec.build(jax.devices())`"

    axis_names: tuple[str, ...] = eqx.field(static=True)
    axis_sizes: tuple[int, ...] = eqx.field(static=True)
    axis_types: tuple[AxisType, ...] = eqx.field(static=True)
    dcn_sizes: tuple[int, ...] = eqx.field(static=True)

    @called("MeshSpec({'data': 4, 'tensor': 2})")
    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]],
        *others: object,
        axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
        dcn: Mapping[str, int] | None = None,
    ):
        """**Arguments:**

        - `axes`: a mapping or pairs from axis name to size, the slowest axis first. One
          size may be -1: see [`shardfx.MeshSpec.fit`][].
        - `axis_types`: one `jax.sharding.AxisType` for all axes, or a mapping by axis
          name; axes that are not in it are Auto.
        - `dcn`: the number of slices (TPU) or nodes (GPU) that each axis spans over the
          slow network; 1 by default.

        **Raises:**

        `MeshError` for axes that are no names with sizes, a repeated axis, a size that
        is neither positive nor -1, two sizes of -1, or a `dcn` entry that does not
        divide its axis.
        """
        if others:
            raise MeshError(
                f"`MeshSpec({axes!r:.60}, {others[0]!r:.60})`: sizes and names of mesh"
                " axes are one argument, unlike in `jax.make_mesh`; write"
                " `MeshSpec(dict(zip(names, sizes)))`, such as `MeshSpec({'data': 4,"
                " 'tensor': 2})`."
            )
        items = axes.items() if isinstance(axes, Mapping) else axes
        pairs: list[Any] = (
            list(items)
            if isinstance(items, Iterable) and not isinstance(items, str)
            else [axes]
        )
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise MeshError(
                f"`MeshSpec({axes!r:.80})`: every mesh axis has a name and a size;"
                " write `MeshSpec({'data': 4, 'tensor': 2})`, or"
                " `MeshSpec.parse('data=4,tensor=2')`."
            )
        self.axis_names = tuple(name for name, _ in pairs)
        self.axis_sizes = tuple(as_int(size) for _, size in pairs)
        types_by_axis = (
            axis_types
            if isinstance(axis_types, Mapping)
            else dict.fromkeys(self.axis_names, axis_types)
        )
        self.axis_types = tuple(
            types_by_axis.get(name, AxisType.Auto) for name in self.axis_names
        )
        if dcn is not None and not isinstance(dcn, Mapping):
            form = {self.axis_names[0]: dcn}
            raise MeshError(f"`dcn={dcn!r}` names no axis; write `dcn={form!r}`.")
        slices = {name: as_int(count) for name, count in (dcn or {}).items()}
        self.dcn_sizes = tuple(slices.get(name, 1) for name in self.axis_names)
        for axis_type in types_by_axis.values():
            check_type(
                what="axis_types",
                value=axis_type,
                expected=AxisType,
                error=MeshError,
                fix="give a `jax.sharding.AxisType` such as `AxisType.Auto`, or a mapping"
                " from axis names to them",
            )
        for by_axis, what in ((types_by_axis, "axis_types"), (dcn or {}, "dcn")):
            require_known(by_axis, self.axis_names, what)

    def __check_init__(self):
        check_axes(self.axis_names, self.axis_sizes, self.dcn_sizes, self)

    def __repr__(self) -> str:
        sizes: dict[str, int] = {}
        types_beside_auto: list[str] = []
        dcn: dict[str, int] = {}
        columns = zip(
            self.axis_names,
            self.axis_sizes,
            self.axis_types,
            self.dcn_sizes,
            strict=True,
        )
        for name, size, axis_type, slice_count in columns:
            sizes[name] = size
            if axis_type != AxisType.Auto:
                types_beside_auto.append(f"{name!r}: AxisType.{axis_type.name}")
            if slice_count != 1:
                dcn[name] = slice_count
        arguments = [repr(sizes)]
        if types_beside_auto:
            arguments.append(f"axis_types={{{', '.join(types_beside_auto)}}}")
        if dcn:
            arguments.append(f"dcn={dcn!r}")
        return f"MeshSpec({', '.join(arguments)})"

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
    ) -> "MeshSpec":
        """The mesh of a text such as `"data=-1,fsdp=4,tensor=2"`, as `str(mesh)` writes
        it. Spaces are allowed around names and sizes, and `:` in the place of `=`, as
        in "dp:2,tp:4".

        **Arguments:**

        - `text`: `name=size` pairs joined by commas, the slowest axis first.
          `data=8(dcn=2)` spans two slices.
        - `axis_types`: one `AxisType` for all axes, or a mapping by axis name; axes
          that are not in it are Auto.

        **Returns:**

        The mesh.

        **Raises:**

        `MeshError` that names a part which is not `name=size`.

        !!! Example

            ```python
            from shardfx import MeshSpec

            assert MeshSpec.parse("data=-1, tensor=4").fit(32).axis_sizes == (8, 4)
            assert str(MeshSpec.parse("dp:2,tp:4")) == "dp=2,tp=4"
            ```
        """
        pairs, dcn = parsed_axes(text)
        return cls(pairs, axis_types=axis_types, dcn=dcn)

    @classmethod
    def of(cls, mesh: "Mesh | AbstractMesh | MeshSpec") -> "MeshSpec":
        """The MeshSpec of a `jax.sharding.Mesh` or `AbstractMesh`, with its axis types.

        **Arguments:**

        - `mesh`: any mesh. A MeshSpec is returned unchanged.

        **Returns:**

        The mesh without its devices. Every axis is within one slice, because JAX meshes
        do not record `dcn`.

        **Raises:**

        `MeshError` for an object that is no mesh.

        !!! Example

            ```python
            import jax
            from shardfx import MeshSpec

            mesh = jax.make_mesh((4, 2), ("data", "tensor"))
            assert str(MeshSpec.of(mesh)) == "data=4,tensor=2"
            assert MeshSpec.of(mesh).axis_types == mesh.axis_types
            ```
        """
        if isinstance(mesh, MeshSpec):
            return mesh
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise of_argument(
                MeshError(
                    "expected a MeshSpec, a jax Mesh or an AbstractMesh, not"
                    f' {type(mesh).__name__}; make one with `MeshSpec({{"data": 4,'
                    ' "tensor": 2})`.'
                )
            )
        return _mesh_of_columns(
            mesh.axis_names,
            tuple(mesh.shape.values()),
            mesh.axis_types,
            (1,) * len(mesh.axis_names),
        )

    @property
    def shape(self) -> Mapping[str, int]:
        """The size of each axis by name, in order; read-only."""
        return types.MappingProxyType(
            dict(zip(self.axis_names, self.axis_sizes, strict=True))
        )

    @property
    def size(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.require_sizes().axis_sizes)

    @called("spec.fit(8)")
    def fit(self, device_count: int) -> "MeshSpec":
        """The mesh with the size -1 replaced, so that it has `device_count` devices.

        **Arguments:**

        - `device_count`: the number of devices.

        **Returns:**

        A MeshSpec without -1 that has exactly `device_count` devices.

        **Raises:**

        `MeshError` if the known sizes do not divide `device_count`, or if no size is -1
        and their product is not `device_count`.

        !!! Example

            ```python
            from shardfx import MeshSpec

            assert MeshSpec({"data": -1, "tensor": 4}).fit(64).axis_sizes == (16, 4)
            ```
        """
        count = whole_number(device_count)
        if count is None:
            number = "len(devices)"
            if isinstance(device_count, str) and device_count.isdecimal():
                number = device_count
            raise MeshError(
                f"`fit` takes a number, not {device_count!r:.60}: write"
                f" `mesh.fit({number})`."
            )
        return self._fitted(count, "")

    def _fitted(self, device_count: int, hint: str) -> "MeshSpec":
        """`fit`, whose errors end with `hint` if there are too few devices. A `{}` in
        it stands for the number of devices that the mesh needs.
        """
        known_size = math.prod(size for size in self.axis_sizes if size != -1)
        hint = hint.format(known_size) if known_size > device_count else ""
        if -1 not in self.axis_sizes and known_size != device_count:
            fewer = ""
            if known_size < device_count:
                fewer = f", or pass fewer devices: `mesh.build(devices[:{known_size}])`"
            raise MeshError(
                f"mesh {self} has {known_size} devices, but there are {device_count}; "
                f"give one axis the size -1 to let it take the rest{fewer}.{hint}"
            )
        if device_count % known_size or device_count < 1:
            raise MeshError(
                f"mesh {self}: the known sizes give {known_size}, which does not divide"
                f" {device_count} devices; use sizes whose product divides"
                f" {device_count}.{hint}"
            )
        sizes = []
        for size in self.axis_sizes:
            sizes.append(device_count // known_size if size == -1 else size)
        return _mesh_of_columns(
            self.axis_names, tuple(sizes), self.axis_types, self.dcn_sizes
        )

    def axis_size(self, names: str | Sequence[str]) -> int:
        """The size of one axis, or the product of the sizes of several.

        **Arguments:**

        - `names`: an axis name, or a sequence of different axis names; `()` gives 1.

        **Returns:**

        The number of shards of a dimension that is sharded over `names`.

        **Raises:**

        `MeshError` for an unknown axis, a repeated axis, or a mesh with a size of -1.

        !!! Example

            ```python
            from shardfx import MeshSpec

            mesh = MeshSpec({"data": 2, "fsdp": 4, "tensor": 8})
            assert mesh.axis_size("fsdp") == 4 and mesh.axis_size(("data", "fsdp")) == 8
            ```
        """
        if not isinstance(names, Iterable):
            raise MeshError(
                f"`axis_size` takes the name of an axis, or several, not {names!r:.60};"
                f" the mesh has {self.axis_names}."
            )
        names = (names,) if isinstance(names, str) else tuple(names)
        require_known(names, self.axis_names, "axis_size")
        if len(set(names)) < len(names):
            raise MeshError(
                f"an axis occurs twice in {names}; a dimension can use each mesh axis"
                " once."
            )
        return math.prod(self.require_sizes().shape[name] for name in names)

    def abstract(self) -> AbstractMesh:
        """The `jax.sharding.AbstractMesh` of the same axes, which suffices for tracing
        and lowering.

        **Returns:**

        The AbstractMesh, with this mesh's axis types.

        **Raises:**

        `MeshError` if a size is -1.

        !!! Example

            ```python
            from shardfx import MeshSpec

            abstract = MeshSpec({"data": 1024, "tensor": 64}).abstract()
            assert abstract.shape == {"data": 1024, "tensor": 64}
            ```
        """
        return AbstractMesh(
            self.require_sizes().axis_sizes, self.axis_names, axis_types=self.axis_types
        )

    def order(self, devices: Devices) -> DeviceOrder:
        """The order in which [`shardfx.MeshSpec.build`][] arranges devices, with the
        method and the reasons.

        JAX's `mesh_utils` orders TPUs, slice by slice if `dcn` or the devices name
        several slices. Then the devices of each axis that fills a box of the torus are
        reordered, so that neighbours on the axis are one hop apart. If `mesh_utils` has
        no order, [`shardfx.topology.torus_order`][] is used. GPUs are sorted by id;
        devices of other kinds keep their order.

        **Arguments:**

        - `devices`: devices, or objects with the same attributes. An axis of size -1
          gets the rest of the devices.

        **Returns:**

        A [`shardfx.topology.DeviceOrder`][].

        **Raises:**

        `MeshError` if the mesh would not use every device, or if it needs slices that
        do not exist.

        !!! Example

            ```python
            import jax
            from shardfx import MeshSpec

            order = MeshSpec({"data": -1, "tensor": 2}).order(jax.devices())
            assert order.devices.shape == (4, 2) and order.method == "mesh_utils"
            ```
        """
        device_list = listed(devices)
        if not device_list:
            raise MeshError(
                "there are no devices; pass `jax.devices()`, or those of one slice."
            )
        platform = getattr(device_list[0], "platform", None)
        if platform is None:
            raise MeshError(
                f"{device_list[0]!r:.60} is no device; pass `jax.devices()`, or some of"
                " these."
            )
        hint = ""
        if platform == "cpu":
            hint = _EMULATE
        fitted = self._fitted(len(device_list), hint)
        return device_order(devices, fitted.axis_sizes, fitted.dcn_sizes)

    if not TYPE_CHECKING:
        # Equinox's own makes a tree of each method, which no method of a mesh needs. It
        # takes 10 us for a method.
        __getattribute__ = object.__getattribute__
        __getitem__ = refused(
            "spec[{}]",
            "`spec.shape[{}]` for the size of an axis, and `spec.axis_names` for the names",
        )
        __contains__ = refused("{} in spec", "`{} in spec.axis_names`")
        __len__ = refused("len(spec)", "`spec.size`, or `len(spec.axis_names)`")
        __enter__ = refused(
            "with spec", "`with jax.set_mesh(spec.build(jax.devices()))`"
        )
        __exit__ = __enter__
        __getattr__ = lacking(ATTRIBUTES, size_of_axis)

        def __bool__(self):
            return True

    @called("spec.build(jax.devices())")
    def build(self, devices: Devices | Mesh) -> Mesh:
        """The `jax.sharding.Mesh` of these axes over `devices`, in an order that suits
        their network.

        **Arguments:**

        - `devices`: the devices, all of which are used, in the order of
          [`shardfx.MeshSpec.order`][]. Or a Mesh, whose devices keep their order, so
          that one `jit` takes arrays on both meshes.

        **Returns:**

        A Mesh with this MeshSpec's names, sizes and axis types.

        **Raises:**

        `MeshError` if the mesh would not use every device, or if it needs slices that
        do not exist.

        !!! Example

            ```python
            import jax
            from shardfx import MeshSpec

            spec = MeshSpec({"data": 2, "tensor": 4})
            mesh = spec.build(jax.devices())
            finer = spec.split("tensor", {"kv": 2, "rep": 2}).build(mesh)
            assert list(finer.devices.flat) == list(mesh.devices.flat)
            ```
        """
        if isinstance(devices, Mesh):
            ordered = devices.devices.reshape(self.fit(devices.size).axis_sizes)
        else:
            ordered = self.order(devices).devices
        return Mesh(ordered, self.axis_names, axis_types=self.axis_types)

    @called("spec.split('data', {'a': 2, 'b': -1})")
    def split(self, axis: str, parts: Mapping[str, int]) -> "MeshSpec":
        """The mesh with one axis split into several, the slowest first. Every device
        keeps its position, so one `jit` takes arrays on both meshes.

        **Arguments:**

        - `axis`: the axis to split.
        - `parts`: the names and sizes of the axes that replace `axis`, which get its
          axis type. One size may be -1. Slices that `axis` spans (`dcn`) go to the
          slowest axes.

        **Returns:**

        A MeshSpec. A dimension sharded over all the `parts`, in order, has the same
        shards as over `axis` before.

        **Raises:**

        `MeshError` for an unknown axis, for a name that the mesh has, for sizes whose
        product is not the size of `axis`, or for slices that cannot be divided among
        the parts.

        !!! Example

            ```python
            from shardfx import MeshSpec

            mesh = MeshSpec({"data": 2, "tensor": 16}).split("tensor", {"kv": 8, "rep": 2})
            assert mesh == MeshSpec({"data": 2, "kv": 8, "rep": 2})
            ```
        """
        require_known((axis,), self.axis_names, "split")
        position = self.require_sizes().axis_names.index(axis)
        size_of_axis = self.axis_sizes[position]
        if not isinstance(parts, Mapping):
            form = f"{{'{axis}_0': 2, '{axis}_1': -1}}"
            raise MeshError(
                f"`split({axis!r}, {parts!r:.60})`: the parts of an axis have names and"
                f" sizes; write `split({axis!r}, {form})`."
            )
        spec_of_parts = MeshSpec(parts)
        product = math.prod(spec_of_parts.axis_sizes)
        if product > 0 and product != size_of_axis:
            raise MeshError(
                f"`split`: the sizes in {dict(parts)} have the product {product}, and"
                f" mesh axis `{axis}` has size {size_of_axis}; give one part the size"
                " -1 to let it take the rest."
            )
        fitted = spec_of_parts.fit(size_of_axis)
        dcn_of_parts = slices_of_parts(axis, self.dcn_sizes[position], fitted)
        # The name, size, type and slices of each axis.
        axes = [
            *zip(
                self.axis_names,
                self.axis_sizes,
                self.axis_types,
                self.dcn_sizes,
                strict=True,
            )
        ]
        axes[position : position + 1] = zip(
            fitted.axis_names,
            fitted.axis_sizes,
            [self.axis_types[position]] * len(dcn_of_parts),
            dcn_of_parts,
            strict=True,
        )
        return _mesh_of_columns(*zip(*axes, strict=True))

    def require_sizes(self) -> "MeshSpec":
        """The mesh itself if no size is -1. Raises `MeshError` otherwise."""
        if -1 in self.axis_sizes:
            raise MeshError(
                f"mesh {self} has an axis of unknown size; call `.fit(device_count)`"
                " first."
            )
        return self

    def __str__(self) -> str:
        columns = zip(self.axis_names, self.axis_sizes, self.dcn_sizes, strict=True)
        axes = []
        for name, size, dcn in columns:
            axes.append(f"{name}={size}" if dcn == 1 else f"{name}={size}(dcn={dcn})")
        return ",".join(axes)


@ft.lru_cache(maxsize=256)
def _mesh_of_columns(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    axis_types: tuple[AxisType, ...],
    dcn_sizes: tuple[int, ...],
) -> MeshSpec:
    """The mesh with these fields, which have an entry for each axis."""
    by_axis = ft.partial(zip, names, strict=True)
    return MeshSpec(
        by_axis(sizes),
        axis_types=dict(by_axis(axis_types)),
        dcn=dict(by_axis(dcn_sizes)),
    )
