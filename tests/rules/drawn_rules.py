"""Rules and names that hypothesis draws, and rules with modes."""

from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardfx import AxisRules


U = P.UNCONSTRAINED
NAMES = st.sampled_from(["a", "b", "c", "d", "e", ""])
AXES = st.sampled_from(["x", "y", "z", "w"])
axis_tuples = st.lists(AXES, min_size=2, max_size=3, unique=True)
TARGETS = st.one_of(
    AXES,
    st.none(),
    st.just(U),
    axis_tuples.map(tuple),
)
pairs = st.tuples(NAMES, TARGETS)
RULES = st.lists(pairs, max_size=8)
unique_names = st.lists(NAMES, unique=True, max_size=5)
ENTRIES = unique_names.flatmap(
    lambda names: st.permutations([*names, None, None, U][: len(names) + 3])
)
POLICIES = st.sampled_from(["replicate", "keep", "unconstrained"])


@st.composite
def shuffled_names(draw):
    """Entries, among them tuples and aliases; the same entries in another order; and
    that order.
    """
    letters = st.sampled_from(["a", "b", "c", "d", "a2", "a3", "b2"])
    lists_of_names = st.lists(
        letters,
        unique=True,
        min_size=1,
    )
    names = draw(lists_of_names)
    flags = st.lists(st.booleans(), min_size=len(names), max_size=len(names))
    cuts = draw(flags)
    entries: list = []
    for name, joined in zip(names, cuts, strict=True):
        if joined and entries:
            if isinstance(entries[-1], tuple):
                entries[-1] = (*entries[-1], name)
            else:
                entries[-1] = (entries[-1], name)
        else:
            entries.append(name)
    positions = range(len(entries))
    orders = st.permutations(positions)
    order = draw(orders)
    moved = []
    for i in order:
        moved.append(entries[i])
    return entries, moved, order


ALIASES = st.permutations([("a2", "a"), ("a3", "a2"), ("b2", "b")])
# What no test draws: rules with modes, and rules that others contradict.
MODES = AxisRules(
    {"a": "x", "b": "y"},
    modes={
        "train": (),
        "decode": {
            "s": None,
            "a": None,
            "b": "x",
            "new": "w",
        },
        "insert": {"b": "z"},
    },
    aliases={"s": "b", "t": "s", "v": "late"},
).extend({"late": "v"})
AB = AxisRules(
    {"a": "x", "b": "y"},
    modes={"train": (), "decode": {"a": "y"}},
    units={"a": 2},
    aliases={"c": "a"},
)
