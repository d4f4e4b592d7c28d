"""A rule set of MaxText's size: nothing is found in it, and it is checked in milliseconds."""

import time

import shardfx as sfx
from tests.see import maxtext_like


def test_a_large_set_of_rules_is_clean_and_fast():
    tree, names = maxtext_like.decoder(100)
    axes, mesh = maxtext_like.AXES, maxtext_like.MESH
    assert (len(axes.rules), len(mesh.axis_names)) == (76, 12)
    assert sfx.lint(tree, mesh, names=names, axes=axes) == ()
    spent, planned = [], []
    for _ in range(7):
        start = time.process_time()
        sfx.lint(tree, mesh, names=names, axes=axes)
        spent.append(time.process_time() - start)
        start = time.process_time()
        sfx.plan(tree, mesh, names=names, axes=axes)
        planned.append(time.process_time() - start)
    # 4.4 ms for 1,002 leaves, 1.7 times what planning takes; type checks in tests and other programs cost more.
    assert min(spent) < 0.25 and min(spent) < 5 * min(planned), (spent, planned)


def test_mistakes_in_a_large_set_are_found_among_its_rules():
    tree, names = maxtext_like.decoder(3)
    # As in one of MaxText's files: a rule to an axis that the mesh lacks, and logical names without rules.
    axes = maxtext_like.AXES.without("embed_moe").extend([("activation_extra", "sequence_parallel")])
    found = sfx.lint(tree, maxtext_like.MESH, names=names, axes=axes)
    assert [(one.code, one.where) for one in found] == [
        ("unknown-name", "name 'embed_moe'"),
        ("absent-axis", "mesh axis 'sequence_parallel'"),
    ]
