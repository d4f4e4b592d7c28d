"""`lint`: finds all mistakes and likely mistakes in rules at once, without devices, and
returns them as data.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from .._ground.errors import MeshError, RuleError, SpecError, whole_number
from .._ground.misuse import called
from .._ground.tree import Flat, flatten
from .._plan import (
    MEMORY_KINDS,
    Content,
    Draft,
    PathTree,
    ShardPlan,
    check_policy,
    drafted,
    kinds_matcher,
    kinds_pairs,
    names_of_leaves,
    raise_empty,
)
from .._rules import (
    AxisRules,
    PathRules,
    check_rules,
    checked_bytes,
    near,
    nearest,
)
from ..topology import MeshSpec
from .draft_checks import (
    absent,
    uncovered_leaves,
    unknown_names,
    unplannable,
    unused_findings,
)
from .fault_checks import known_faults
from .finding import Finding, Findings, Severity, findings_of
from .heads import cut_heads
from .leaf_checks import corrected, replicated, uneven_layers
from .rule_checks import contradicted_names, dead_rules, unused_axes
from .state_checks import optimizer_states
from .subject import Subject


@called(
    "lint(tree, mesh, paths=rules)",
    rules="`paths=` for PathRules, or `axes=` for AxisRules",
)
def lint(
    tree: object,
    mesh: MeshSpec | Mesh | AbstractMesh | None = None,
    *,
    paths: PathRules | None = None,
    names: object = None,
    axes: AxisRules | None = None,
    mode: str | None = None,
    min_bytes: int = 0,
    memory_kinds: Iterable[tuple[str, str]] | None = None,
    unmatched: Literal["raise", "replicate"] = "raise",
    unused: Literal["raise", "allow"] = "raise",
    strict: bool = False,
    refine: bool = False,
    replicated_bytes: int = 2**26,
    head_dim: int | None = None,
) -> Findings:
    """All mistakes and likely mistakes in a tree's rules at once, as data.

    It takes the arguments of [`shardfx.plan`][]. Errors that `plan` would raise are
    findings of severity "error", and there is such a finding exactly if `plan` raises.
    A finished plan can be checked too, with or without optimizer states.

    **Arguments:**

    - `tree`, `mesh`: a tree of arrays or ShapeDtypeStructs, and a mesh. Or a
      [`shardfx.ShardPlan`][] without rules: `lint(plan)`.
    - `paths`: rules that map a leaf's path to its sharding.
    - `names`, `axes`: a tree of logical names, and rules that map names to mesh axes.
    - `mode`: the mode, such as "decode", whose rules in `axes` come first; `None` for
      the rules without a mode.
    - `min_bytes`: arrays of fewer bytes in total are replicated.
    - `memory_kinds`: pairs of a regex and a memory kind, for the arrays whose paths the
      regex matches.
    - `unmatched`, `unused`: "raise" makes findings errors; "replicate" and "allow" make
      them warnings: `unmatched` those about arrays and names without a rule and about
      mesh axes that the mesh lacks, `unused` those about rules that apply to no array.
    - `strict`: whether it is an error if an array is sharded less than its rule
      requests.
    - `refine`: whether `plan` splits a mesh axis if a dimension can use only some of
      its size.
    - `replicated_bytes`: the least number of bytes of a replicated leaf that is
      reported. Optimizer states that could be sharded further are reported if this
      would save as many bytes.
    - `head_dim`: the number of elements of an attention head, if the tree does not show
      it.

    **Returns:**

    `Findings`: a tuple of `Finding`s, most bytes first, which prints as a table. Each
    has a `fix`: statements that change the variables named like these arguments. `lint`
    proposes them and does not try them.

    **Raises:**

    `RuleError` for `paths` and `axes` of other types, for other arguments with a
    value that they cannot have, and for rules beside a plan; `LeafTypeError` for a tree
    of specs or without arrays.
    Mistakes in rules do not raise.

    !!! Example

        ```python
        import jax
        from shardfx import AxisRules, MeshSpec, lint

        tree = {"embed": jax.ShapeDtypeStruct((50257, 768), "float32")}
        axes = AxisRules([("vocab", "tensor"), ("embd", "fsdp")])
        mesh = MeshSpec({"fsdp": 4, "tensor": 2})
        found = lint(tree, mesh, names={"embed": ("vocab", "embed")}, axes=axes)
        assert [one.code for one in found] == ["unknown-name", "corrected"]
        assert found[0].fix == "axes = axes.with_alias('embed', of='embd')"
        print(found)
        ```
    """
    min_bytes = checked_bytes("min_bytes", min_bytes)
    replicated_bytes = checked_bytes("replicated_bytes", replicated_bytes)
    check_policy("lint", "unmatched", unmatched, "replicate")
    check_policy("lint", "unused", unused, "allow")
    head_dim = _head_elements(head_dim)
    if isinstance(tree, ShardPlan):
        given = {"paths": paths, "names": names, "axes": axes, "mode": mode}
        given |= {"min_bytes": min_bytes or None, "memory_kinds": memory_kinds}
        given |= {"strict": strict or None, "refine": refine or None}
        _refuse_beside_plan(tree, mesh, given)
        subject = _subject_of_plan(tree)
        return findings_of(_of_leaves(subject, replicated_bytes, head_dim))
    if mesh is None:
        raise MeshError(
            "`lint` needs the mesh: `lint(tree, MeshSpec({...}), ...)`; a plan alone"
            " has its own."
        )
    check_rules(paths, axes)
    flat = flatten(tree)
    if unused == "raise":
        raise_empty(tree, flat, paths)

    findings: list[Finding] = []
    leaf_names = _names(names=names, tree=tree, flat=flat, axes=axes, findings=findings)
    kinds = _kinds(memory_kinds, findings)
    # All other checks go on without an unknown mode.
    if mode is not None and mode not in _modes_of(axes):
        findings.append(_unknown_mode(axes, mode))
        mode = None
    draft = drafted(
        flat=flat,
        leaf_names=leaf_names,
        mesh=mesh,
        paths=paths,
        axes=axes,
        mode=mode,
        min_bytes=min_bytes,
        kinds=kinds_matcher(kinds),
    )

    subject = Subject(
        content=_content_of(draft, flat, axes, mode),
        flat=flat,
        leaf_names=leaf_names,
        paths=paths,
        axes=axes,
        mode=mode,
        min_bytes=min_bytes,
        strict=strict,
        refine=refine,
    )
    findings += _of_rules(
        subject=subject,
        draft=draft,
        kinds=kinds,
        of_unmatched=_severity(unmatched),
        of_unused=_severity(unused),
    )
    findings += _of_leaves(subject, replicated_bytes, head_dim)
    return findings_of(findings)


def _refuse_beside_plan(
    plan: ShardPlan,
    mesh: MeshSpec | Mesh | AbstractMesh | None,
    given: Mapping[str, object],
) -> None:
    """Raises `RuleError` if arguments of `lint` are given beside a plan that say how to
    plan a tree. A plan has a mesh, and the rules that made it are no longer known.
    `given` has the arguments by name, and `None` for those that are not given.
    """
    own_values = {"axes": plan.axes, "mode": plan.mode, "strict": plan.strict or None}
    ignored = []
    # Findings depend on no slices and no types of axes, which a mesh of devices may not
    # have as the plan does.
    if mesh is not None and MeshSpec.of(mesh).shape != plan.mesh.shape:
        ignored.append("mesh")
    for name, value in given.items():
        if value is not None and value != own_values.get(name):
            ignored.append(name)
    for name in ignored[:1]:
        other = (
            f"lint the tree itself by the rules: `lint(plan.structs, mesh, {name}=...)`"
        )
        if name == "mesh":
            other = "plan the same arrays for this mesh: `lint(plan.replan(mesh))`"
        raise RuleError(
            f"`lint(plan, {name}=...)`: a plan is made already, and `{name}` would have"
            f" no effect. Write `lint(plan)`, or {other}."
        )


def _head_elements(head_dim: object) -> int | None:
    """The argument `head_dim` of `lint` as a Python int, or `None`. Raises `RuleError`
    if it is no positive integer.
    """
    if head_dim is None:
        return None
    elements = whole_number(head_dim)
    if elements is None or elements < 1:
        raise RuleError(
            "`head_dim` is the number of elements of an attention head, not"
            f" {head_dim!r}; write it as in `head_dim=128`, or leave it out."
        )
    return elements


def _severity(policy: str) -> Severity:
    """The severity of findings for an argument "raise", or for another value of it."""
    if policy == "raise":
        return "error"
    return "warning"


def _content_of(
    draft: Draft,
    flat: Flat,
    axes: AxisRules | None,
    mode: str | None,
) -> Content:
    """What a plan of `flat` would hold, where an array without a row is replicated."""
    return Content(
        mesh=draft.mesh,
        jax_mesh=None,
        axes=axes,
        mode=mode,
        rows=draft.rows,
        index=[max(number, -1) for number in draft.row_indices],
        path_tree=PathTree(flat.paths, flat.treedef),
    )


def _subject_of_plan(plan: ShardPlan) -> Subject:
    """The input of checks of a finished plan, which has no rules and no tree."""
    content = plan.content
    return Subject(
        content=content,
        flat=flatten(()),
        leaf_names=(),
        paths=None,
        axes=content.axes,
        mode=content.mode,
        min_bytes=0,
        strict=content.strict,
        refine=False,
        is_plan=True,
    )


def _modes_of(axes: AxisRules | None) -> tuple[str, ...]:
    """The modes that the rules have."""
    if axes is None:
        return ()
    return tuple(mode for mode, _ in axes.modes)


def _unknown_mode(axes: AxisRules | None, mode: str) -> Finding:
    """The finding for a mode that the rules lack, or that is given without rules."""
    modes = _modes_of(axes)
    message = f"the mode {mode!r} is unknown; the rules have"
    message += f" {modes}{near(str(mode), modes)}"
    if axes is None:
        message = f"{mode!r} is a mode of `axes`, which are not given"
    nearest_mode = next(iter(nearest(str(mode), modes)), None)
    fix = f"mode = {nearest_mode!r}"
    return Finding(
        code="invalid",
        severity="error",
        where=f"mode {mode!r}",
        bytes=0,
        message=message,
        fix=fix,
    )


def _of_rules(
    subject: Subject,
    draft: Draft,
    kinds: Sequence[tuple[str, str]],
    of_unmatched: Severity,
    of_unused: Severity,
) -> Iterator[Finding]:
    """The findings of all checks of the rules that made the plan `draft`.

    `kinds` has pairs of a regex and a memory kind. `of_unmatched` is the severity of
    findings about arrays and names without a rule and about absent mesh axes;
    `of_unused` that of findings about rules that apply to no array.
    """
    yield from unplannable(subject, draft)
    yield from uncovered_leaves(subject, draft, of_unmatched)
    yield from unknown_names(subject, draft, of_unmatched)
    yield from absent(subject, draft, of_unmatched)
    yield from unused_findings(subject, draft, kinds, of_unused)
    yield from unused_axes(subject, of_unmatched)
    yield from dead_rules(subject)


def _of_leaves(
    subject: Subject,
    replicated_bytes: int,
    head_dim: int | None,
) -> Iterator[Finding]:
    """The findings of all checks that need only a plan, and not the path rules that
    made it.

    Replicated arrays are found if they have at least `replicated_bytes` bytes.
    `head_dim` is the number of elements of an attention head.
    """
    yield from corrected(subject)
    yield from replicated(subject, replicated_bytes)
    yield from cut_heads(subject, head_dim)
    yield from contradicted_names(subject)
    yield from uneven_layers(subject)
    yield from optimizer_states(subject, replicated_bytes)
    yield from known_faults(subject)


def _names(
    names: object,
    tree: object,
    flat: Flat,
    axes: AxisRules | None,
    findings: list[Finding],
) -> Sequence[Any]:
    """The logical names of each leaf in `flat`, the leaves of `tree`; `None` for a leaf
    without names.

    `names` is the argument of `lint`. If it does not fit the tree, no leaf has names,
    and `findings` gets a finding.
    """
    try:
        return names_of_leaves(names, tree, flat, axes)
    except (RuleError, SpecError) as error:
        findings.append(
            Finding(
                code="invalid",
                severity="error",
                where="names",
                bytes=0,
                message=str(error),
                fix="names = None",
            )
        )
        return [None] * len(flat.leaves)


def _kinds(
    memory_kinds: Iterable[tuple[str, str]] | None,
    findings: list[Finding],
) -> list[tuple[str, str]]:
    """The valid pairs of a regex and a memory kind. A finding about each invalid pair
    is added to `findings`.
    """
    pairs = kinds_pairs(memory_kinds)
    valid: list[tuple[str, str]] = []
    for number, (regex, kind) in enumerate(pairs):
        try:
            kinds_matcher([(regex, kind)])
            valid.append((regex, kind))
        except RuleError as error:
            pairs_of_fix = (*pairs[:number], *pairs[number + 1 :])
            similar = nearest(str(kind), MEMORY_KINDS)
            if kind not in MEMORY_KINDS and similar:
                corrected_pair = (regex, similar[0])
                pairs_of_fix = (*pairs[:number], corrected_pair, *pairs[number + 1 :])
            where = f"memory_kinds[{number}] {regex!r}"
            fix = f"memory_kinds = {pairs_of_fix!r}"
            findings.append(
                Finding(
                    code="invalid",
                    severity="error",
                    where=where,
                    bytes=0,
                    message=str(error),
                    fix=fix,
                )
            )
    return valid
