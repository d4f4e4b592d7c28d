"""`ShardPlan`, the immutable plan that users hold."""

from collections.abc import Iterator, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    overload,
)

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._ground.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    RuleError,
    UnknownPathError,
    check_type,
)
from .._ground.misuse import Method, called, lacking, refused
from .._ground.reason import Decision
from .._ground.text import plural
from .._ground.tree import Flat, near_paths
from .._rules import AxisRules, PathRules, compiled
from ..topology import MeshSpec
from .content import LEFT_OUT, NO_ARRAY, Content, at_leaves, joined_contents, read_json
from .decide import sizes_of_shape
from .facts import html_of
from .leaf import LeafPlan, named_sharding
from .matching import rows_of, shaped_like
from .plan_type import ATTRIBUTES, JOIN, PlanType, array_of_plan
from .replanning import replanned
from .single import decision_for, replaced, require_constrained
from .tree_type import Tree


if TYPE_CHECKING:
    _of_type = staticmethod
else:

    class _of_type(staticmethod):
        """A static method that makes a plan of others, and refuses a call on a plan,
        which it would leave out.
        """

        def __get__(self, instance, owner=None):
            if instance is not None:
                raise PlanMismatchError(
                    "`plan.join(...)` would leave `plan` out: write"
                    " `ShardPlan.join(params=plan, opt=opt_plan)`, each plan by its key."
                )
            return super().__get__(instance, owner)


class ShardPlan(eqx.Module, Generic[Tree], metaclass=PlanType):
    """A plan: for every array of a tree its PartitionSpec, the reason for it, and its
    bytes per device.

    Made by [`shardfx.plan`][].

    A plan is a value: it can be printed, stored, compared, hashed, and closed over. It
    can be an argument of a jitted function; an equal plan, such as one read back from
    JSON, does not cause a recompilation. It can be pickled; if it has devices, the
    unpickling process must have devices with the same ids
    ([`shardfx.ShardPlan.off`][]).

    A plan is indexed by path: `plan["layers/0/w"]` is a [`shardfx.LeafPlan`][],
    `"layers/0/w" in plan` says whether there is such an array, `for path in plan`
    iterates over the paths, and `len(plan)` counts the arrays.
    """

    __module__ = "shardfx"
    _told = "no tree of shardings: write `plan.shardings`"

    content: Content = eqx.field(static=True)
    # JAX asserts without a text that what it takes for shardings is no leaf, and takes
    # a node without children for a leaf. An empty tuple is a child without leaves.
    _children: tuple[()] = eqx.field(default=(), kw_only=True)

    @property
    def mesh(self) -> MeshSpec:
        """The mesh of the plan."""
        return self.content.mesh

    @property
    def jax_mesh(self) -> Mesh | None:
        """The jax Mesh of the plan's devices; `None` if the plan has no devices. See
        [`shardfx.ShardPlan.on`][].
        """
        return self.content.jax_mesh

    @property
    def axes(self) -> AxisRules | None:
        """The rules that resolve logical names in [`shardfx.constrain`][]; `None` if
        the plan was made without them.
        """
        return self.content.axes

    @property
    def mode(self) -> str | None:
        """The mode of `axes`, such as "decode", whose rules come before the others;
        `None` for no such rules.
        """
        return self.content.mode

    @property
    def strict(self) -> bool:
        """Whether the plan was made with `strict=True`. Then [`shardfx.constrain`][] is
        strict too.
        """
        return self.content.strict

    @property
    def leaves(self) -> tuple[LeafPlan, ...]:
        """One [`shardfx.LeafPlan`][] per array, in the tree's order."""
        return self.content.leaves

    @property
    def specs(self) -> Any:
        """The tree with a PartitionSpec at each array, and `None` at leaves that are
        not arrays.
        """
        return self.content.specs

    @property
    def shardings(self) -> Tree:
        """The tree with a NamedSharding at each array: on the plan's jax Mesh, or on an
        AbstractMesh if it has none.
        """
        return self.content.shardings

    @property
    def structs(self) -> Tree:
        """The tree with a `jax.ShapeDtypeStruct` at each array, with the array's shape,
        dtype and planned sharding.
        """
        pairs = zip(self.content.rows, self.content.row_shardings, strict=True)
        return self.content.tree(
            [
                jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=sharding)
                for row, sharding in pairs
            ]
        )

    @property
    def bytes_total(self) -> int:
        """The bytes of all the arrays together, without counting replicas."""
        return self.content.total_bytes[0]

    @property
    def bytes_per_device(self) -> int:
        """The bytes of the shards that each device holds; every device holds the same
        number.
        """
        return self.content.total_bytes[1]

    @property
    def digest(self) -> str:
        """The sha256 of the plan's JSON without its digest, in hex: the same on every
        process.
        """
        return self.content.digest

    def __contains__(self, path: object) -> bool:
        return path in self.content.by_path

    def __iter__(self) -> Iterator[str]:
        return (path for path, i in self.content.paths_and_rows if i >= 0)

    def __len__(self) -> int:
        return sum(i >= 0 for i in self.content.index)

    def __bool__(self) -> bool:
        return True  # also for a plan without arrays, whose `len` is 0, since `if plan:` tests for `None`

    def __getitem__(self, path: str) -> LeafPlan:
        """The plan of the array at `path`. Raises `UnknownPathError` if no array, or
        several, have this path.
        """
        leaf_by_path = self.content.by_path
        if not isinstance(path, str):
            raise UnknownPathError(
                f'a plan is indexed by the path of an array, as in `plan["layers/0/w"]`,'
                f" and not by {path!r}; `plan.leaves` has them in order."
            )
        leaf = leaf_by_path.get(path)
        if leaf is None:
            raise UnknownPathError(
                f"the plan has no leaf `{path}`{near_paths(str(path), leaf_by_path)}"
            )
        if self.content.path_tree.paths.count(path) > 1:
            raise UnknownPathError(
                f"several leaves have the path `{path}`; read them from `plan.leaves`."
            )
        return leaf

    if not TYPE_CHECKING:
        # Equinox's own makes a tree of each method, which no method of a plan needs. It
        # takes 0.4 us for an attribute, and JAX reads two in each call with a plan.
        __getattribute__ = object.__getattribute__
        __setitem__ = refused(
            "plan[{}] = ...", "`plan.replace({}, spec)`, which returns a new plan"
        )
        __add__ = refused("plan + {}", JOIN)
        __or__ = refused("plan | {}", JOIN)
        __getattr__ = lacking(ATTRIBUTES, array_of_plan)

    @called("plan.on(plan.mesh.build(jax.devices()))")
    def on(self, jax_mesh: Mesh) -> "ShardPlan[Tree]":
        """Returns the same plan on a mesh of devices, so that `plan.shardings` can be
        used with arrays.

        **Arguments:**

        - `jax_mesh`: a mesh with the plan's axes, sizes and axis types;
          `plan.mesh.build(devices)` makes one.

        **Returns:**

        A plan with the same digest, on these devices.

        **Raises:**

        `PlanMismatchError` if the mesh has other axes, sizes or axis types; `MeshError`
        if `jax_mesh` is not a Mesh.
        """
        fix = "make one of devices with `plan.on(plan.mesh.build(devices))`"
        check_type(
            what="jax_mesh", value=jax_mesh, expected=Mesh, error=MeshError, fix=fix
        )
        mesh = MeshSpec.of(jax_mesh)
        has_names = mesh.axis_names == self.mesh.axis_names
        has_sizes = mesh.shape == self.mesh.shape
        if not has_names or not has_sizes or mesh.axis_types != self.mesh.axis_types:
            raise PlanMismatchError(
                f"the plan is for the mesh {self.mesh!r}, not for {mesh!r}; make the"
                " mesh with `plan.mesh.build(devices)`, or plan again for this one."
                " (`jax.make_mesh` makes Explicit axes, `jax.sharding.Mesh` Auto"
                " ones.)"
            )
        return ShardPlan(self.content.replaced(jax_mesh=jax_mesh))

    def off(self) -> "ShardPlan[Tree]":
        """Returns the same plan without devices: to store, to send to another process,
        or to put on other devices.

        **Returns:**

        A plan with the same digest whose `jax_mesh` is `None`;
        [`shardfx.ShardPlan.on`][] puts it on devices.

        !!! Example

            ```python
            import pickle

            import jax
            import jax.numpy as jnp
            from shardfx import MeshSpec, PathRules, plan

            mesh = MeshSpec({"data": 8}).build(jax.devices())
            made = plan({"w": jnp.ones((8, 4))}, mesh, paths=PathRules.parse(".*->data"))
            again = pickle.loads(pickle.dumps(made.off()))
            assert again.jax_mesh is None and again.on(mesh) == made
            ```
        """
        return ShardPlan(self.content.replaced(jax_mesh=None))

    @_of_type
    def join(*others: object, **plans: "ShardPlan[Any]") -> "ShardPlan[dict[str, Any]]":
        """Returns the plan of a dict of trees, made from the plans of the trees.

        **Arguments:**

        - `plans`: plans for the same mesh, each passed by the key that its tree has in
          the dict.

        **Returns:**

        The plan of `{"params": ..., "opt": ...}` for
        `ShardPlan.join(params=..., opt=...)`.

        **Raises:**

        `PlanMismatchError` if the plans are for different meshes, rules or modes.
        """
        if others:
            raise PlanMismatchError(
                "`join` takes each plan by the key of its tree, and none by position:"
                " `ShardPlan.join(params=params_plan, opt=opt_plan)`."
            )
        if not plans:
            raise PlanMismatchError(
                "`join` needs at least one plan, each with the key of its tree: "
                "`ShardPlan.join(params=params_plan, opt=opt_plan)`."
            )
        for name, plan in plans.items():
            check_plan(name, plan)
        return ShardPlan(
            joined_contents({name: plans[name].content for name in sorted(plans)})
        )

    @overload
    def sharding(
        self,
        names_or_spec: Any,
        shape: Sequence[int] | None = None,
        *,
        strict: bool | None = None,
        unmatched: Literal["raise", "replicate"] = "raise",
        explain: Literal[False] = False,
    ) -> NamedSharding: ...
    @overload
    def sharding(
        self,
        names_or_spec: Any,
        shape: Sequence[int] | None = None,
        *,
        strict: bool | None = None,
        unmatched: Literal["raise", "replicate"] = "raise",
        explain: Literal[True],
    ) -> tuple[NamedSharding, Decision]: ...
    @called("plan.sharding(names)")
    def sharding(
        self,
        names_or_spec: object,
        shape: Sequence[int] | None = None,
        *,
        strict: bool | None = None,
        unmatched: Literal["raise", "replicate"] = "raise",
        explain: bool = False,
    ) -> NamedSharding | tuple[NamedSharding, Decision]:
        """Returns the sharding of a batch or activation, for `jax.device_put`,
        `jax.jit` and [`shardfx.filter_jit`][].

        [`shardfx.constrain`][] gives the same sharding to an array of this shape.

        **Arguments:**

        - `names_or_spec`: a PartitionSpec, or logical names for the plan's `axes`, one
          per dimension or with `...`.
        - `shape`: the shape of the array, to which the sharding is corrected. With
          `None` the sharding is for arrays of any shape whose sizes it divides, and
          dimensions beyond the end of the names are not sharded. If a name has units
          ([`shardfx.atomic`][]), such as attention heads, the sizes of its mesh axes
          must divide the number of units that the plan's arrays have of it.
        - `strict`: raise if a mesh axis would be dropped; `None` for the plan's own
          `strict`.
        - `unmatched`: "raise" makes two things an error: a name without a rule, and a
          mesh axis of a spec that the mesh lacks and the rules do not declare.
          "replicate" ignores such names and axes.
        - `explain`: return the decision as well.

        **Returns:**

        A NamedSharding on the plan's jax Mesh if it has one, else on an AbstractMesh.
        With `explain=True`, a pair of the sharding and the [`shardfx.Decision`][],
        which holds a reason for each axis that was dropped.

        **Raises:**

        The errors of [`shardfx.constrain`][]. `SpecError` also for a dimension that is
        UNCONSTRAINED, since JAX has no such sharding outside a compiled function; and
        where, without a shape, a shard might split a unit.

        !!! Example

            ```python
            import jax
            import jax.numpy as jnp
            from jax.sharding import PartitionSpec as P
            from shardfx import AxisRules, MeshSpec, plan

            axes = AxisRules([("batch", ("data", "fsdp")), ("embed", "fsdp")])
            mesh = MeshSpec({"data": 2, "fsdp": 4}).build(jax.devices())
            made = plan({"w": jnp.ones((16, 8))}, mesh, names={"w": ("embed", None)}, axes=axes)
            batch = jax.device_put(jnp.ones((32, 16)), made.sharding(("batch", None)))
            assert batch.sharding.spec == P(("data", "fsdp"))
            ```
        """
        sizes = None if shape is None else sizes_of_shape(shape)
        strict = self.strict if strict is None else strict
        decision = decision_for(
            names_or_spec=names_or_spec,
            shape=sizes,
            plan=self.content,
            mesh=self.mesh,
            strict=strict,
            unmatched=unmatched,
        )
        require_constrained(names_or_spec, decision.spec)
        sharding = named_sharding(self.content.any_mesh, decision.spec, None)
        if explain:
            return (sharding, decision)
        return sharding

    if not TYPE_CHECKING:
        sharding = Method(sharding, "of a whole tree write `plan.shardings`")

    @called("plan.replace(path, spec)")
    def replace(self, where: str, target: object) -> "ShardPlan[Tree]":
        """Returns the plan with another sharding for some arrays, checked and corrected
        as in [`shardfx.plan`][].

        **Arguments:**

        - `where`: the path of an array; or, if no array has that path, a regex that is
          searched in each path.
        - `target`: a PartitionSpec, or any other target of a rule in
          [`shardfx.PathRules`][].

        **Returns:**

        A plan in which the `rule` of these arrays is "replaced by hand".

        **Raises:**

        `UnknownPathError` if `where` matches no array; `RuleError`, `SpecError` or
        `UnmatchedError` if the target cannot be applied, has a mesh axis or logical
        name that is unknown, or does not fit and the plan is strict.

        !!! Example

            ```python
            import jax.numpy as jnp
            from jax.sharding import PartitionSpec as P
            from shardfx import MeshSpec, PathRules, plan

            tree = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
            made = plan(tree, MeshSpec({"data": 4}), paths=PathRules([(".*", P("data"))]))
            other = made.replace("w", P(None, "data"))
            assert other["w"].spec == P(None, "data") and other["w"].rule == "replaced by hand"
            ```
        """
        return ShardPlan(replaced(self.content, where, target))

    @called("plan.select('^layers/')")
    def select(self, regex: str) -> "ShardPlan[Tree]":
        """Returns the plan of the same tree with only the arrays whose path `regex`
        matches.

        **Arguments:**

        - `regex`: searched in each path with `re.search`.

        **Returns:**

        A plan whose tree has `None` at all other arrays.

        **Raises:**

        `RuleError` if the regex does not compile, or matches no path.
        """
        if not isinstance(regex, str):
            example = "w"
            if isinstance(regex, list | tuple):
                example = "|".join(map(str, regex))
            raise RuleError(
                f"`select({regex!r:.60})` takes one regex: write `select({example!r})`."
            )
        (pattern,) = compiled(PathRules([(regex, None)]))
        index = []
        for path, row_number in self.content.paths_and_rows:
            if row_number >= 0 and pattern.search(path) is None:
                row_number = LEFT_OUT
            index.append(row_number)
        if max(index, default=NO_ARRAY) < 0:
            raise RuleError(
                f"`select({regex!r})` matches no path of the plan; paths look like"
                f" `{next(iter(self), '')}`."
            )
        return ShardPlan(self.content.replaced(index=index))

    def replan(self, mesh: MeshSpec | Mesh | AbstractMesh) -> "ShardPlan[Tree]":
        """Returns the plan of the same arrays by the same rules for another mesh: fewer
        devices after a loss, more after a recovery.

        **Arguments:**

        - `mesh`: the new mesh. Specs lose the axes that it lacks and the axes that no
          longer divide a dimension. Axes that did not fit on the old mesh are tried
          again.

        **Returns:**

        The new plan. [`shardfx.diff`][] shows the changes; `reshard(state, new_plan)`
        moves the arrays.

        !!! Example

            ```python
            import jax
            import jax.numpy as jnp
            from jax.sharding import PartitionSpec as P
            from shardfx import MeshSpec, PathRules, diff, plan

            tree = {
                "w": jax.ShapeDtypeStruct((24, 8), jnp.float32),
                "b": jax.ShapeDtypeStruct((8,), jnp.float32),
            }
            before = plan(tree, MeshSpec({"data": 8}), paths=PathRules.parse(".*->data"))
            after = before.replan(MeshSpec({"data": 6}))
            assert after["w"].spec == P("data") and after["b"].spec == P()
            print(diff(before, after))
            ```
        """
        return ShardPlan(replanned(self.content, mesh))

    @called("pathlib.Path('plan.json').write_text(plan.to_json())")
    def to_json(self) -> str:
        """Returns the plan as JSON text with a format version and its digest, without
        the devices of a jax Mesh.
        """
        return self.content.to_json()

    @staticmethod
    def from_json(text: str, like: object = None) -> "ShardPlan[Any]":
        """Reads a plan from the JSON that [`shardfx.ShardPlan.to_json`][] returned.

        **Arguments:**

        - `text`: the JSON.
        - `like`: the planned tree, of arrays or ShapeDtypeStructs. Without it, dicts,
          lists and tuples keep their types, and nodes of other types, such as modules,
          become dicts.

        **Returns:**

        A plan equal to the written one. If `like` differs from the planned tree in
        leaves that are not arrays (`None` where the planned tree had functions, for
        example), it is the plan of `like`, with another digest.

        **Raises:**

        `PlanFormatError` if the text is truncated, of another version, or was edited
        into something invalid; `PlanMismatchError` if `like` is another tree.
        """
        content = read_json(text)
        if like is not None:
            content = shaped_like(content, like)
        return ShardPlan(content)

    def __repr__(self) -> str:
        devices_text = "" if self.jax_mesh is None else ", on devices"
        return (
            f"ShardPlan({plural(len(self), 'array')}, mesh {self.mesh},"
            f" {self.bytes_total} bytes, {self.bytes_per_device} per"
            f" device{devices_text})"
        )

    def _repr_html_(self) -> str:
        # A notebook shows this for a plan on the last line of a cell.
        return html_of(self.content)


def check_plan(what: str, value: object, form: str = "") -> None:
    """Raises `LeafTypeError` unless `value`, the argument named `what`, is a plan.

    `form` is the call with its arguments in their order, for the message.
    """
    fix = "pass what `shardfx.plan(tree, mesh, ...)` returns"
    if form:
        fix = f"{fix}, as in `{form}`"
    check_type(what=what, value=value, expected=ShardPlan, error=LeafTypeError, fix=fix)


def shardings_of_leaves(plan: ShardPlan, flat: Flat) -> list[Any]:
    """Returns the sharding of each leaf of a planned tree on the plan's devices; `None`
    for leaves that are not arrays. Raises `PlanMismatchError` if the arrays are not the
    planned ones, or the plan has no devices.
    """
    index = rows_of(plan.content, flat)
    if plan.jax_mesh is None:
        raise PlanMismatchError(
            f"the plan is for the mesh {plan.mesh} and has no devices; use"
            " `plan.on(plan.mesh.build(jax.devices()))`."
        )
    return at_leaves(plan.content.row_shardings, index)
