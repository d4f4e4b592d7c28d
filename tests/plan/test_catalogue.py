import catalogue
import jax
import pytest

from benchmarks import _shapes as shapes


@pytest.mark.parametrize("name", catalogue.MODELS)
def test_every_head_pattern_finds_leaves_that_hold_whole_heads(name):
    model = catalogue.MODELS[name]
    found = catalogue.fused_of(model)
    assert all(shape[dim] % unit == 0 for _, shape, dim, unit in found)
    assert len({(dim, unit) for _, _, dim, unit in found}) == len({fused[1:] for fused in model.fused})


def test_the_benchmarked_trees_have_the_leaves_that_the_limits_are_stated_for():
    assert len(jax.tree.leaves(shapes.llama_405b())) == 1137
    assert len(jax.tree.leaves(shapes.deepseek_v3())) == 47705


def test_stacking_keeps_every_parameter():
    llama = catalogue.MODELS["llama3-8b"].make()
    stacked = catalogue.stacked(llama)
    assert catalogue.parameters(stacked) == catalogue.parameters(llama)
    assert len(jax.tree.leaves(stacked)) == 12
