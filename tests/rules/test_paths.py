import re
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

from shardfx import PathRules, atomic, fsdp, match, optional, replicate
from shardfx._rules.path_rules import is_digit_blind
from shardfx.errors import RuleError


TREE = {
    "attn": {"q": jnp.ones((4, 8)), "bias": jnp.ones(8)},
    "mlp": jnp.ones((8, 4)),
    "step": 3,
}


def test_the_first_rule_that_matches_decides():
    rules = PathRules([("attn/q", P("a")), ("attn", P("b")), ("q", P("c"))])
    expected = {
        "attn": {"q": 0, "bias": 1},
        "mlp": None,
        "step": None,
    }
    assert match(TREE, rules) == expected


def test_rules_are_values():
    make = lambda: PathRules(
        [
            ("a", P("x", None)),
            ("b", ("embed", atomic("kv", 4))),
            ("c", fsdp("x") | fsdp("y")),
        ]
    )
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != PathRules([("a", P("x"))])
    rules = PathRules([("w", P())], mesh_axes=("pod",))
    declared = rules.prepend([("b", P())]).extend([("c", P())])
    rules = [("b", P()), ("w", P()), ("c", P())]
    expected = PathRules(rules, mesh_axes=["pod"])
    assert declared == expected
    rules = [("mlp", P("x")), (".*", None)]
    expected = PathRules(rules)
    assert PathRules({"mlp": P("x"), ".*": None}) == expected


def test_parse():
    rules = PathRules.parse(
        "attention|mlp->data.model, w{1,2}->None.data+model , .*->P|fsdp(data,model),"
        " z->replicate"
    )
    spec = P("P") | fsdp(("data", "model"))
    expected = (
        ("attention|mlp", P("data", "model")),
        ("w{1,2}", P(None, ("data", "model"))),
        (".*", spec),
        ("z", replicate),
    )
    assert rules.rules == expected


TEXTS = {
    "a->b->c": "more than one `->`",
    "|a->dp": "an empty alternative would match every path",
    "a->d p": "'d p' is no mesh axis",
    "a->": "'' is no mesh axis",
    "a(->x": "no `->` outside of brackets",
    "a->fsdp()": "'' is no mesh axis",
    "a->fsdp(x)|y": "only the first target may be",
}
TARGETS = {
    "data": r"('a') has the target 'data'",
    3: "it must be a PartitionSpec, a tuple",
    (1,): "1 in (1,) is no logical",
}
ONE_RULE = PathRules([("a", P())])
NO_NUMBERS: list[Any] = [None, (0,)]
ODD_DIMS: list[Any] = [None, (0, "1"), "0", -1, 0.5, True]


@pytest.mark.parametrize(
    "make, message",
    [
        *(
            (lambda text=text: PathRules.parse(text), message)
            for text, message in TEXTS.items()
        ),
        *(
            (lambda target=target: PathRules([("a", target)]), message)
            for target, message in TARGETS.items()
        ),
        *((lambda axes=axes: fsdp(axes), "fsdp") for axes in ((), "", ("a", "a"))),
        (lambda: fsdp("a", -1), "a number of bytes is not negative"),
        *(
            (
                lambda dims=dims: fsdp("a", skip_dims=dims),
                f"`fsdp(..., skip_dims={dims!r})`",
            )
            for dims in ODD_DIMS
        ),
        *(
            (lambda value=value: fsdp("a", max_bytes=value), "give a number of bytes")
            for value in NO_NUMBERS
        ),
        *(
            (lambda value=value: ONE_RULE.drop(value), "rules are numbered from 0")
            for value in NO_NUMBERS
        ),
        *(
            (lambda value=value: PathRules.parse(value), "reads text, such as")
            for value in NO_NUMBERS
        ),
        (
            lambda: optional(P("x")) | fsdp("y"),
            f"write `optional({P('x')!r} | fsdp('y'))`",
        ),
        (lambda: fsdp("x") | P("y"), "only the first target"),
        (lambda: P("x") | replicate, "only the first target"),
    ],
)
def test_malformed_rules_are_refused(make, message, as_users_run_it):
    with pytest.raises(RuleError, match=re.escape(message)):
        make()


BLIND = [
    r"layers/\d+/w",
    r"layers/[0-9]/w",
    r"layers/[^/]+/(q|k)_proj$",
    "[/-:]",
    r"(?<=x)a.*?\bb(?!c)",
]
# "{2}" may be text too.
SEEING = [
    r"layers/\d{2}/",
    r"[{2}]",
    r"\[0-9]",
    r"\N{DIGIT ONE}",
    r"(?P<a>\d)/(?P=a)",
    "layers/0/",
    "[1-3]",
    r"(.)/\1",
]


@pytest.mark.parametrize(
    "pattern", [*BLIND, *SEEING, r"a[^5]", r"expert_(?:1|2)", "\\x31"]
)
def test_digit_blindness(pattern):
    assert is_digit_blind(pattern) is (pattern in BLIND)


PIECES = st.sampled_from(
    r"\d 0 [0-9] [2-7] [^3] a . \w / (?:1|a) [a-f] \D (a|/) [/-:] [!-a] \[".split()
)


@given(
    st.lists(
        st.tuples(PIECES, st.sampled_from(["", "*", "+", "?", "{2}"])),
        min_size=1,
        max_size=5,
    ),
    st.text("a/0123456789", max_size=8),
    st.data(),
)
def test_a_digit_blind_regex_cannot_tell_digits_apart(pieces, path, data):
    pattern = "".join(piece + repeat for piece, repeat in pieces)
    if is_digit_blind(pattern):
        other = ""
        for letter in path:
            if letter.isdigit():
                letter = data.draw(st.sampled_from("0123456789"))
            other += letter
        actual = bool(re.search(pattern, path))
        assert actual == bool(re.search(pattern, other))
