"""`lint`: finds all mistakes and likely mistakes in rules at once, without devices, and
returns them as data.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._ground.errors import MeshError, RuleError, SpecError
from .._ground.spec import entries_of, entry_axes
from .._ground.text import between_numbers, joined, together
from .._ground.tree import Flat, flatten
from .._plan import (
    MEMORY_KINDS,
    NAMES,
    Content,
    Draft,
    PathTree,
    ShardPlan,
    Unused,
    absent_axes,
    drafted,
    kinds_matcher,
    names_of_leaves,
    raise_empty,
    uncovered,
    unknown_of_rows,
    unknown_units,
    unused_rules,
)
from .._rules import (
    AxisRules,
    Optional,
    PathRules,
    check_rules,
    members_of,
    near,
    nearest,
)
from ..topology import MeshSpec
from .fault_checks import known_faults
from .finding import Finding, Findings, Severity, findings_of
from .heads import cut_heads
from .leaf_checks import corrected, optimizer_states, replicated, uneven_layers
from .rule_checks import contradicted_names, dead_rules, unused_axes
from .subject import Subject, code_of


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
      [`shardfx.ShardPlan`][]: `lint(plan)`.
    - `paths`: rules that map a leaf's path to its sharding.
    - `names`, `axes`: a tree of logical names, and rules that map names to mesh axes.
    - `mode`: the mode, such as "decode", whose rules in `axes` come first; `None` for
      the rules without a mode.
    - `min_bytes`: arrays of fewer bytes in total are replicated.
    - `memory_kinds`: pairs of a regex and a memory kind, for the arrays whose paths the
      regex matches.
    - `unmatched`, `unused`: "raise" makes findings errors, else they are warnings:
      `unmatched` those about arrays and
        names without a rule and about mesh axes that the mesh lacks, `unused` those
        about rules that apply to no array.
    - `strict`: whether it is an error if an array is sharded less than its rule
      requests.
    - `refine`: whether `plan` splits a mesh axis if a dimension can use only some of
      its size.
    - `replicated_bytes`: the least number of bytes of a replicated leaf that is
      reported. Optimizer states that could
        be sharded further are reported if this would save as many bytes.
    - `head_dim`: the number of elements of an attention head, if the tree does not show
      it.

    **Returns:**

    `Findings`: a tuple of `Finding`s, most bytes first, which prints as a table. Each
    has a `fix`: statements that change the variables named like these arguments. `lint`
    proposes them and does not try them.

    **Raises:**

    `RuleError` for `paths` and `axes` of other types, `LeafTypeError` for a tree of
    specs or without arrays. Mistakes in rules do not raise.

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
    if isinstance(tree, ShardPlan):
        content = tree.content
        of_plan = (
            flatten(()),
            (),
            None,
            content.axes,
            content.mode,
            0,
            content.strict,
            False,
            True,
        )
        return findings_of(
            _of_leaves(Subject(content, *of_plan), replicated_bytes, head_dim)
        )
    if mesh is None:
        raise MeshError(
            "`lint` needs the mesh: `lint(tree, MeshSpec({...}), ...)`; a plan alone"
            " has its own."
        )
    check_rules(paths, axes)
    flat = flatten(tree)
    found = list[Finding]()
    if unused == "raise":
        raise_empty(tree, flat, paths)
    leaf_names = _names(names, tree, flat, axes, found)
    kinds = _kinds(memory_kinds, found)
    draft = drafted(
        flat, leaf_names, mesh, paths, axes, mode, min_bytes, kinds_matcher(kinds)
    )
    if axes is not None and mode is not None and mode not in dict(axes.modes):
        if draft.errors:
            known = tuple(dict(axes.modes))
            message = (
                f"the mode {mode!r} is unknown; the rules have"
                f" {known}{near(mode, known)}"
            )
            fix = f"mode = {next(iter(nearest(mode, known)), None)!r}"
            found.append(Finding("invalid", "error", f"mode {mode!r}", 0, message, fix))
        mode = None
        draft = drafted(
            flat, leaf_names, mesh, paths, axes, mode, min_bytes, kinds_matcher(kinds)
        )
    index = [max(number, -1) for number in draft.numbers]
    content = Content(
        draft.mesh,
        None,
        axes,
        mode,
        draft.rows,
        index,
        PathTree(flat.paths, flat.treedef),
    )
    subject = Subject(
        content, flat, leaf_names, paths, axes, mode, min_bytes, strict, refine
    )
    rules: Severity = "error" if unmatched == "raise" else "warning"
    found += unplannable(subject, draft)
    found += uncovered_leaves(subject, draft, rules)
    found += unknown_names(subject, draft, rules)
    found += absent(subject, draft, rules)
    found += unused_findings(
        subject, draft, kinds, "error" if unused == "raise" else "warning"
    )
    found += unused_axes(subject, rules)
    found += dead_rules(subject)
    return findings_of([*found, *_of_leaves(subject, replicated_bytes, head_dim)])


def _of_leaves(
    subject: Subject, replicated_bytes: int, head_dim: int | None
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
    found: list[Finding],
) -> Sequence[Any]:
    """The logical names of each leaf in `flat`, the leaves of `tree`; `None` for a leaf
    without names.

    `names` is the argument of `lint`. If it does not fit the tree, no leaf has names,
    and `found` gets a finding.
    """
    try:
        return names_of_leaves(names, tree, flat, axes)
    except (RuleError, SpecError) as error:
        found.append(
            Finding("invalid", "error", "names", 0, str(error), "names = None")
        )
        return [None] * len(flat.leaves)


def _kinds(
    memory_kinds: Iterable[tuple[str, str]] | None, found: list[Finding]
) -> list[tuple[str, str]]:
    """The valid pairs of a regex and a memory kind. A finding about each invalid pair
    is added to `found`.
    """
    pairs = tuple(memory_kinds or ())
    valid = list[tuple[str, str]]()
    for at, (regex, kind) in enumerate(pairs):
        try:
            kinds_matcher([(regex, kind)])
            valid.append((regex, kind))
        except RuleError as error:
            meant = [
                (regex, other)
                for other in nearest(kind, MEMORY_KINDS)[:1]
                if kind not in MEMORY_KINDS
            ]
            fix = f"memory_kinds = {(*pairs[:at], *meant, *pairs[at + 1 :])!r}"
            found.append(
                Finding(
                    "invalid",
                    "error",
                    f"memory_kinds[{at}] {regex!r}",
                    0,
                    str(error),
                    fix,
                )
            )
    return valid


# The number of groups without a rule for which the nearest rule is searched: the search
# takes longer than planning.
_HINTED = 40


def unplannable(subject: Subject, draft: Draft) -> Iterator[Finding]:
    """Findings for leaves that cannot be planned. Equal leaves of repeated layers are
    one finding.
    """
    flat = subject.flat
    groups = dict[object, list[int]]()
    for at, number in enumerate(draft.numbers):
        if number <= -2:
            text = str(draft.errors[-2 - number][1])
            groups.setdefault((between_numbers(flat.paths[at]), text), []).append(at)
    for places in groups.values():
        leaf = flat.leaves[places[0]]
        paths = [flat.paths[at] for at in places]
        size = sum(
            subject.lost(tuple(flat.leaves[at].shape), flat.leaves[at].dtype)
            for at in places
        )
        text = str(draft.errors[-2 - draft.numbers[places[0]]][1])
        if subject.leaf_names[places[0]] is None:
            fix = subject.rule_fix(paths, subject.target_for(tuple(leaf.shape)))
        elif subject.axes is None:
            wanted = dict.fromkeys(
                name for names in subject.leaf_names for name in members_of(names)
            )
            fix = (
                "axes ="
                f" AxisRules([{', '.join(f'({name!r}, None)' for name in wanted)}])"
            )
        else:
            fix = subject.names_fix(
                paths, _fitting(tuple(subject.leaf_names[places[0]]), len(leaf.shape))
            )
        yield Finding("unplannable", "error", joined(paths), size, text, fix)


def _fitting(names: tuple[object, ...], rank: int) -> tuple[object, ...]:
    """Valid logical names for an array of rank `rank`, made from names of another
    length or with a name twice.

    Duplicates become `None`, names beyond the rank are left out, and missing names
    become `...` in front: for rank 3, `("a", "a")` becomes `(..., "a", None)`. The
    result is `()` if an entry is neither a name, `None` nor `...`.
    """
    if not all(name is None or name is ... or isinstance(name, str) for name in names):
        return ()
    once = [
        None if name in names[:at] else name
        for at, name in enumerate(names)
        if name is not ...
    ][:rank]
    return (..., *once) if len(once) < rank else tuple(once)


def uncovered_leaves(
    subject: Subject, draft: Draft, severity: Severity
) -> Iterator[Finding]:
    groups = together(
        uncovered(draft), lambda leaf: (between_numbers(leaf[0]), leaf[1])
    )
    patterns = (
        ()
        if subject.paths is None
        else tuple(regex for regex, _ in subject.paths.rules)
    )
    for number, leaves in enumerate(groups.values()):
        paths = [path for path, _ in leaves]
        row = leaves[0][1]
        like = near(paths[0], patterns) if number < _HINTED else ""
        told = "an array" if len(paths) == 1 else f"{len(paths)} arrays"
        message = (
            f"no rule covers {told} of shape {row.shape}{like}, so every device holds"
            " all of it"
        )
        size = subject.lost(row.shape, row.dtype) * len(paths)
        fix = subject.rule_fix(paths, subject.target_for(row.shape), last=True)
        yield Finding("unmatched", severity, joined(paths), size, message, fix)


def unknown_names(
    subject: Subject, draft: Draft, severity: Severity
) -> Iterator[Finding]:
    """Findings, of this severity, for logical names that have no rule. The names are
    those of arrays, and those in `AxisRules(units=...)`.
    """
    axes = subject.axes
    if axes is None:
        return
    for name in unknown_units(axes):
        message = (
            f"`units` has {name!r}{near(name, axes.names)}, and no rule of `axes` is"
            " about that name"
        )
        yield Finding(
            "unknown-name",
            severity,
            f"units {name!r}",
            0,
            message,
            f"axes = axes.without({name!r})",
        )
    unknown = unknown_of_rows(draft.rows, axes)
    leaves = [
        (name, path, row)
        for path, number, row in draft.arrays(unknown)
        for name in unknown[number]
    ]
    for name, own in together(leaves, lambda leaf: leaf[0]).items():
        size = sum(subject.lost(row.shape, row.dtype) for _, _, row in own)
        meant = nearest(name, axes.names)
        fix = (
            f"axes = axes.with_alias({name!r}, of={meant[0]!r})"
            if meant
            else f"axes = axes.extend([({name!r}, None)])"
        )
        message = (
            "no rule of `axes` is about the logical name"
            f" {name!r}{near(name, axes.names)} of `{own[0][1]}`"
        )
        message += f" and {len(own) - 1} more" if len(own) > 1 else ""
        yield Finding("unknown-name", severity, f"name {name!r}", size, message, fix)


def absent(subject: Subject, draft: Draft, severity: Severity) -> Iterator[Finding]:
    """Findings, of this severity, for mesh axes that rules of `draft` use and its mesh
    lacks. Axes that the rules declare, as in `PathRules(..., mesh_axes=["x"])`, are not
    found.
    """
    known = draft.mesh.axis_names
    for axis, user in absent_axes(draft).items():
        message = (
            f"{user} uses the mesh axis {axis!r}{near(axis, known)}; the mesh has"
            f" {known}"
        )
        what = "axes" if subject.axes is not None else "paths"
        meant = nearest(axis, known)
        fix = "\n".join(_corrected_axis(subject, axis, meant[0])) if meant else ""
        fix = fix or f"{what} = {what}.extend(mesh_axes=({axis!r},))"
        yield Finding("absent-axis", severity, f"mesh axis {axis!r}", 0, message, fix)


def _corrected_axis(subject: Subject, axis: str, meant: str) -> Iterator[str]:
    """Yields lines of code that replace the mesh axis `axis` by the axis `meant` in all
    rules. Rules whose target is a callable do not change.
    """
    axes = subject.axes
    paths = subject.paths
    places = (
        []
        if axes is None
        else [
            ("axes", mode, rules) for mode, rules in ((None, axes.rules), *axes.modes)
        ]
    )
    places += [] if paths is None else [("paths", None, paths.rules)]
    for what, mode, rules in places:
        for number, (_, target) in enumerate(rules):
            code = code_of(target)
            if repr(axis) not in code:
                continue
            of_mode = "" if mode is None else f", mode={mode!r}"
            # No array is sharded over one axis twice.
            right = (
                code_of(_without(target, axis))
                if repr(meant) in code
                else code.replace(repr(axis), repr(meant))
            )
            if right != code:
                yield f"{what} = {what}.replace({number}, {right}{of_mode})"


def _without(target: object, axis: str) -> object:
    """The target of a rule without the mesh axis `axis`.

    A target that contains other targets, such as `P("data") | fsdp("tensor")`, does not
    change.
    """
    if isinstance(target, PartitionSpec):
        entries = [
            (entry, tuple(one for one in entry_axes(entry) if one != axis))
            for entry in entries_of(target)
        ]
        return PartitionSpec(
            *[
                left or None if axis in entry_axes(entry) else entry
                for entry, left in entries
            ]
        )
    return (
        tuple(one for one in target if one != axis)
        if isinstance(target, tuple)
        else target
    )


def unused_findings(
    subject: Subject, draft: Draft, kinds: Sequence[tuple[str, str]], severity: Severity
) -> Iterator[Finding]:
    """Findings for path rules that shard no leaf, and for entries of `kinds` that apply
    to no leaf.

    `kinds` has pairs of a regex and a memory kind. A rule with `optional(...)` is
    found, with severity "info", only if it matches leaves that earlier rules shard.
    """
    rules = draft.paths.rules
    used = draft.paths.used
    for why in unused_rules(rules, used, subject.flat, subject.leaf_names, NAMES):
        yield _unused(
            f"paths[{why.number}] {rules[why.number][0]!r}",
            "rule",
            severity,
            why,
            _fix(subject, why),
        )
    # One path of each group shows which optional rules match at all; many rules of a
    # preset do not.
    first = [group.paths[0] for group in subject.content.groups]
    spare = {}
    for number, (_, target) in enumerate(rules):
        if (
            number not in used
            and isinstance(target, Optional)
            and any(map(subject.patterns[number].search, first))
        ):
            spare[number] = target.target
    others = dict.fromkeys(
        number for number in range(len(rules)) if number not in spare
    )
    plain = [(regex, spare.get(number)) for number, (regex, _) in enumerate(rules)]
    for why in (
        unused_rules(plain, others, subject.flat, subject.leaf_names, NAMES)
        if spare
        else ()
    ):
        # A rule that shards these arrays and no others was put before the rules of a
        # preset on purpose.
        if any(
            wide
            for number, wide in subject.rules_for(why.arrays).items()
            if number is not None
        ):
            yield _unused(
                f"paths[{why.number}] {rules[why.number][0]!r}",
                "rule",
                "info",
                why,
                _fix(subject, why),
            )
    for why in unused_rules(draft.kinds.rules, draft.kinds.used, subject.flat):
        fix = f"memory_kinds = {(*kinds[: why.number], *kinds[why.number + 1 :])!r}"
        yield _unused(
            f"memory_kinds[{why.number}] {kinds[why.number][0]!r}",
            "entry",
            severity,
            why,
            fix,
        )


def _unused(
    where: str, what: str, severity: Severity, why: Unused, fix: str
) -> Finding:
    code = "unused-rule" if why.nearest is not None else "shadowed-rule"
    return Finding(code, severity, where, 0, f"the {what} {why.text}", fix)


def _fix(subject: Subject, why: Unused) -> str:
    """Code that puts the unused rule `why` before all other rules, so that it shards
    the arrays that it matches.

    If no path matches it, or if another rule would then be unused, the code removes the
    rule `why` instead.
    """
    deciders = {
        number: wide
        for number, wide in subject.rules_for(why.arrays).items()
        if number is not None
    }
    if deciders and all(deciders.values()):
        return (
            f"paths = paths.prepend([paths.rules[{why.number}]]).drop({why.number + 1})"
        )
    return f"paths = paths.drop({why.number})"
