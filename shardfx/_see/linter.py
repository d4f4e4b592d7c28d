"""All mistakes and likely mistakes in rules at once, as data, without devices."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from jax.sharding import AbstractMesh, Mesh

from .._ground.errors import MeshError, RuleError, SpecError
from .._ground.tree import Flat, flatten
from .._plan import MEMORY_KINDS, Content, ShardPlan, Skeleton, drafted, kinds_matcher, names_of_leaves, raise_empty
from .._rules import AxisRules, PathRules, check_axis_rules, check_path_rules, near, nearest
from ..topology import MeshSpec
from .finding import Finding, Findings, Severity, findings_of
from .heads import cut_heads
from .leaf_checks import corrected, replicated
from .mistakes import absent, uncovered_leaves, unknown_names, unplannable, unused_findings
from .rule_checks import contradicted_names, dead_rules, unused_axes
from .states import optimizer_states, uneven_layers
from .subject import Subject


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

    It takes the arguments of [`shardfx.plan`][]. Errors that `plan` would raise are findings of severity "error", and
    there is such a finding exactly if `plan` raises. A finished plan can be checked too, with or without optimizer
    states.

    **Arguments:**

    - `tree`, `mesh`, `paths`, `names`, `axes`, `mode`, `min_bytes`, `memory_kinds`, `unmatched`, `unused`, `strict`,
        `refine`: as in [`shardfx.plan`][]; or a [`shardfx.ShardPlan`][] alone, `lint(plan)`.
    - `replicated_bytes`: leaves of so many bytes are reported if every device holds them whole; and so is what sharding
        optimizer states further would save.
    - `head_dim`: the number of elements of an attention head, if the tree does not tell.

    **Returns:**

    `Findings`: a tuple of `Finding`s, most bytes first, which prints as a table. Each has a `fix`: statements over the
    names of these arguments that resolve it.

    **Raises:**

    `RuleError` for `paths` and `axes` of other types, `LeafTypeError` for a tree of specs or without arrays. Mistakes
    in rules do not raise.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        from shardfx import AxisRules, MeshSpec, lint

        tree = {"embed": jax.ShapeDtypeStruct((50257, 768), jnp.float32)}
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
        of_plan = (flatten(()), (), None, content.axes, content.mode, 0, content.strict, False, True)
        return findings_of(_of_leaves(Subject(content, *of_plan), replicated_bytes, head_dim))
    if mesh is None:
        raise MeshError("`lint` needs the mesh: `lint(tree, MeshSpec({...}), ...)`; a plan alone has its own.")
    if paths is not None:
        check_path_rules("paths", paths)
    if axes is not None:
        check_axis_rules("axes", axes)
    flat, found = flatten(tree), list[Finding]()
    if unused == "raise":
        raise_empty(tree, flat, paths)
    given = _names(names, tree, flat, axes, found)
    kinds = _kinds(memory_kinds, found)
    draft = drafted(flat, given, mesh, paths, axes, mode, min_bytes, kinds_matcher(kinds))
    if axes is not None and mode is not None and mode not in dict(axes.modes):
        if draft.errors:
            known = tuple(dict(axes.modes))
            message = f"the mode {mode!r} is unknown; the rules have {known}{near(mode, known)}"
            fix = f"mode = {next(iter(nearest(mode, known)), None)!r}"
            found.append(Finding("invalid", "error", f"mode {mode!r}", 0, message, fix))
        mode = None
        draft = drafted(flat, given, mesh, paths, axes, mode, min_bytes, kinds_matcher(kinds))
    index = [max(number, -1) for number in draft.numbers]
    content = Content(draft.mesh, None, axes, mode, draft.rows, index, Skeleton(flat.paths, flat.treedef))
    subject = Subject(content, flat, given, paths, axes, mode, min_bytes, strict, refine)
    rules: Severity = "error" if unmatched == "raise" else "warning"
    found += unplannable(subject, draft)
    found += uncovered_leaves(subject, draft, rules)
    found += unknown_names(subject, draft, rules)
    found += absent(subject, draft, rules)
    found += unused_findings(subject, draft, kinds, "error" if unused == "raise" else "warning")
    found += unused_axes(subject, rules)
    found += dead_rules(subject)
    return findings_of([*found, *_of_leaves(subject, replicated_bytes, head_dim)])


def _of_leaves(subject: Subject, replicated_bytes: int, head_dim: int | None) -> Iterator[Finding]:
    """The findings that need no more than a plan."""
    yield from corrected(subject)
    yield from replicated(subject, replicated_bytes)
    yield from cut_heads(subject, head_dim)
    yield from contradicted_names(subject)
    yield from uneven_layers(subject)
    yield from optimizer_states(subject, replicated_bytes)


def _names(names: object, tree: object, flat: Flat, axes: AxisRules | None, found: list[Finding]) -> Sequence[Any]:
    """The names of each leaf. Names that do not fit the tree become a finding, and no leaf has names then."""
    try:
        return names_of_leaves(names, tree, flat, axes)
    except (RuleError, SpecError) as error:
        found.append(Finding("invalid", "error", "names", 0, str(error), "names = None"))
        return [None] * len(flat.leaves)


def _kinds(given: Iterable[tuple[str, str]] | None, found: list[Finding]) -> list[tuple[str, str]]:
    """The valid pairs of a regex and a memory kind. Each invalid pair becomes a finding."""
    pairs, valid = tuple(given or ()), list[tuple[str, str]]()
    for at, (regex, kind) in enumerate(pairs):
        try:
            kinds_matcher([(regex, kind)])
            valid.append((regex, kind))
        except RuleError as error:
            meant = [(regex, other) for other in nearest(kind, MEMORY_KINDS)[:1] if kind not in MEMORY_KINDS]
            fix = f"memory_kinds = {(*pairs[:at], *meant, *pairs[at + 1 :])!r}"
            found.append(Finding("invalid", "error", f"memory_kinds[{at}] {regex!r}", 0, str(error), fix))
    return valid
