"""The vectors of eformer: those that are skipped, and those that deviate, with reasons."""

from typing import Any

from conformance.vectors import Raises, Suite, U
from jax.sharding import PartitionSpec as P

from shardfx.errors import (
    LeafTypeError,
    MeshError,
    PlanMismatchError,
    RuleError,
    SpecError,
)


CONTEXT = (
    "the original reads a mesh from its surroundings; here the mesh is an argument"
)
REGISTRY = (
    "internals of the original's registry; aliases are part of the rules here, see"
    " test_rules.py"
)
INTERNAL = "internals of the original, no counterpart needed"
AUTO = (
    "a strategy of the original that ignores names and paths; fsdp(...) is tested in"
    " test_paths.py"
)
SKIPPED = {
    **dict.fromkeys(
        (
            "eformer-0027",
            "eformer-0028",
            "eformer-0050",
            "eformer-0051",
            "eformer-0281",
        ),
        CONTEXT,
    ),
    **dict.fromkeys(
        [f"eformer-02{n}" for n in (27, 28, 29, 30, 31, 32, 34, 36, 37, 38)], REGISTRY
    ),
    **dict.fromkeys([f"eformer-02{n}" for n in (39, 40, 41, 44, 85, 86)], INTERNAL),
    "auto_spec.": AUTO,
    "constraints.names_in_current_mesh": "`name in mesh.axis_names`, as Python has it",
    **dict.fromkeys(
        ("get_partition_manager", "PartitionManager.__"),
        "B31 to B33: nothing is ambient, so none leaks",
    ),
    "sharding_utils.": "see test_conformance_eformer_checkpoints.py",
}

# id -> (what shardfx gives, why not what the original gives)
DEVIATIONS: dict[str, tuple[Any, str]] = {
    # get_corrected_named_sharding
    "eformer-0007": (
        P("tp"),
        (
            "B4: of a tuple that does not divide, the subset with the largest product"
            " is kept"
        ),
    ),
    "eformer-0008": (P("dp"), "B4"),
    "eformer-0009": (P("dp"), "B4: only the absent member is dropped"),
    "eformer-0013": (
        Raises(SpecError, "has 2 entries, but shape"),
        "B5: a spec longer than the rank is an error",
    ),
    "eformer-0014": (Raises(SpecError, "has 1 entry, but shape"), "B5"),
    "eformer-0017": (P(U, "tp"), "B10: UNCONSTRAINED is kept"),
    "eformer-0018": (P(U, U), "B10"),
    "eformer-0022": (P("dp"), "B6: the first dimension that asks for an axis has it"),
    "eformer-0023": (P(("dp", "tp")), "B6"),
    "eformer-0029": (
        P("dp"),
        "B11: the mesh is an argument, jax.set_mesh makes no difference",
    ),
    # with_sharding_constraint
    "eformer-0033": (P(), "B8: P() replicates"),
    "eformer-0036": (Raises(SpecError, "has 2 entries, but shape"), "B5"),
    "eformer-0037": (P("dp", "tp"), "B11: works under jax.set_mesh"),
    "eformer-0038": (
        Raises(PlanMismatchError, "the plan has none"),
        "no silent no-op without devices",
    ),
    "eformer-0041": (
        Raises(LeafTypeError, "takes one array, not dict"),
        "B7: nothing is swallowed",
    ),
    "eformer-0042": (
        P("dp", "tp"),
        "B14: Explicit axes go through jax.sharding.reshard",
    ),
    "eformer-0043": (P("dp", "tp"), "B7, B14"),
    # reading
    "eformer-0056": ((), "B18: UNCONSTRAINED names no axis"),
    "eformer-0062": (
        Raises(MeshError, "an axis occurs twice"),
        "an axis cannot shard a dimension twice",
    ),
    "eformer-0077": (2, "the size of a mesh axis is known outside of shard_map too"),
    "eformer-0114": (P("dp"), "structs with a sharding are read like arrays"),
    "eformer-0116": (P("dp"), "B25: a mesh is needed for bare PartitionSpecs alone"),
    "eformer-0117": (
        {
            "a": P("dp"),
            "b": None,
            "f": None,
            "i": None,
        },
        "leaves that are no arrays have no spec",
    ),
    # match_partition_rules
    "eformer-0078": (
        {
            "layer": {
                "bias": P("dp"),
                "cell": P("dp"),
                "cnt": None,
                "scale": P(),
                "weight": P("tp"),
            }
        },
        "leaves that are no arrays have no spec",
    ),
    "eformer-0083": (
        {"b": P(), "i": None},
        "B22: arrays of rank 0 are replicated, whatever the rules say",
    ),
    "eformer-0086": ({"i": None}, "leaves that are no arrays need no rule"),
    "eformer-0087": (Raises(SpecError, "has 3 entries"), "B5"),
    "eformer-0088": (Raises(SpecError, "has 3 entries"), "B5"),
    "eformer-0089": (
        {"layer/bias": None, "layer/weight": None},
        "B21: ints are no arrays",
    ),
    "eformer-0097": ({"a": P()}, "the target None replicates"),
    "eformer-0099": (["a", "z"], "B20: JAX sorts the keys of dicts, and says so"),
    # analyze_sharding_strategy
    "eformer-0100": ((68, 64, 96), "B1: bytes per device are counted"),
    "eformer-0101": ((64, 64, 64), "B2: members of a tuple multiply"),
    "eformer-0102": ((64, 0, 512), "B3: P(None, None) is replicated"),
    # create_pattern_based_partition_spec
    "eformer-0105": ([P(None, "tp")], "B24: None is a token"),
    "eformer-0106": ([P("dp"), P("tp")], "B24: spaces round tokens do not count"),
    "eformer-0107": (
        Raises(RuleError, "a rule has no `->`"),
        "B24: a malformed rule is an error",
    ),
    "eformer-0110": (
        Raises(RuleError, "an empty alternative would match every path"),
        "B24",
    ),
    # make_shard_and_gather_fns
    "eformer-0122": (P(), "B16: P() replicates on the mesh"),
    "eformer-0123": ("ArrayImpl", "B15: NumPy arrays are placed like others"),
    "eformer-0125": (P(), "corrected, with a reason; strict=True raises"),
    # resolve_axis: an axis is used once, so the results are specs that JAX accepts
    "eformer-0183": (
        Raises(RuleError, "uses mesh axis `dp` twice"),
        "B43: dp twice on one dimension means nothing",
    ),
    "eformer-0191": ([None], "B37: a name can be registered as replicated"),
    "eformer-0194": (
        [("tp", "dp")],
        'with unmatched="keep"; the default replicates, at both levels',
    ),
    "eformer-0197": (["dp"], "B39: an alias keeps the decode rule"),
    "eformer-0198": ([None], "B38: the alias and the token agree"),
    "eformer-0199": ([None], "B38: None is expressible as replicated in decode"),
    "eformer-0200": (
        ["typo_literal"],
        "`correct` tells that the mesh has no such axis",
    ),
    "eformer-0201": ([None], "EMPTY is None here, no name that could be overridden"),
    "eformer-0202": (
        ["dp"],
        'with unmatched="keep"; "raise" is the error of the original',
    ),
    "eformer-0204": (
        [("dp", "zz")],
        'with unmatched="keep"; `correct` tells that the mesh has no such axis',
    ),
    "eformer-0207": ([("fsdp", "dp", "sp")], "B43: the axes of a composite are joined"),
    "eformer-0208": ([("fsdp", "dp", "sp")], "B43"),
    "eformer-0209": (["fsdp"], "B43: EMPTY in a composite is nothing"),
    "eformer-0210": (["fsdp"], "B43: None in a composite is nothing"),
    "eformer-0212": (
        [("fsdp", "dp"), "tp", None],
        "B6: tp goes to the first rule that wants it",
    ),
    "eformer-0213": ([None], "B38"),
    "eformer-0219": ([("sp", "fsdp", "dp")], "B43"),
    "eformer-0223": (["model", None, None], "B6"),
    "eformer-0224": (
        ["head_axis"],
        "fields are not dereferenced: a string is a mesh axis",
    ),
    "eformer-0225": (Raises(RuleError, "mode 'bogus' is unknown"), "B40"),
    "eformer-0243": (
        ["model", "model"],
        "B44: rules are made from their arguments, so nothing is left behind",
    ),
    # PartitionManager
    "eformer-0246": (
        [("fsdp", "dp"), None, "tp"],
        "dp on two dimensions: JAX refuses what the original returns",
    ),
    "eformer-0253": (Raises(RuleError, "an int, not a bool"), "B42"),
    "eformer-0254": ([("fsdp", "dp")], "B41: names come from one argument"),
    "eformer-0276": (
        P("fsdp", "tp"),
        "B4: the part of (fsdp, dp) that divides is kept",
    ),
    "eformer-0277": (P("dp", "tp"), "B4: the mesh has no fsdp, dp is kept"),
    "eformer-0278": (P(), "B9: what is corrected to nothing is replicated"),
    "eformer-0280": (P(("fsdp", "dp"), "tp"), "B6"),
}

SUITE = Suite("eformer.json", SKIPPED, DEVIATIONS)
