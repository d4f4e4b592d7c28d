"""The assumptions of the tests about other libraries' rules, compared with the sources
of those libraries.
"""

import ast
import collections
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from _sources import folder_of
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from presets.small_models import config_of

from shardfx import MeshSpec, plan
from shardfx.errors import RuleError
from shardfx.interop import keras
from shardfx.presets import maps


PLANS = json.loads(
    Path(__file__).parents[1].joinpath("data", "huggingface_plans.json").read_text()
)


def attributes(source):
    """The names of modules and parameters that a source gives to `self`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                names.add(name)
            case ast.Call(
                ast.Attribute(
                    ast.Name("self"), "register_buffer" | "register_parameter"
                ),
                [name, *_],
            ):
                names.add(ast.literal_eval(name))
    return names


def modeling(folder):
    files = sorted(folder.glob("modeling_*.py"))
    source = "".join(file.read_text() for file in files)
    return attributes(source)


def unknown(paths, recorded):
    """The parts of paths that no module has for a name."""
    parts = set()
    for path in paths:
        parts.update(re.sub(r"\{[^}]*\}", "0", path).split("."))
    names = {part for part in parts if not part.isdigit()}
    return sorted(names - recorded - {"weight", "bias"})


@pytest.mark.parametrize("name", PLANS)
def test_hand_checked_plans_have_the_names_of_transformers(name):
    files = (folder_of("transformers") / "models").glob("*/configuration_*.py")
    folders = [
        file.parent
        for file in files
        if re.search(rf"^class {name}\(", file.read_text(), re.MULTILINE)
    ]
    assert len(folders) == 1
    assert unknown(PLANS[name], modeling(folders[0])) == []
    # Of the whole model: a plan's names begin where the model without its head does.
    files = folders[0].glob("modeling_*.py")
    (text,) = [file.read_text() for file in files]
    prefix = re.findall(r'base_model_prefix = "(\w+)"', text)[0]
    parts = {path.split(".")[0] for path in PLANS[name]}
    assert parts <= {prefix, "lm_head"}


def test_the_layer_after_the_last_is_no_layer_of_transformers():
    text = (
        folder_of("transformers") / "models" / "deepseek_v3" / "modeling_deepseek_v3.py"
    ).read_text()
    assert r"model\.layers\.61.*" in text
    ahead = config_of("deepseek_v3", layers=61) | {"num_nextn_predict_layers": 1}
    assert "model.layers.61.{rest*}" in maps.hugging_face(ahead, ahead="drop").rest


@pytest.fixture(scope="module")
def layout_map():
    """Keras's own LayoutMap, taken out of its source: the library itself wants a
    backend.
    """
    text = (
        folder_of("keras") / "src" / "distribution" / "distribution_lib.py"
    ).read_text()
    (class_node,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "LayoutMap"
    ]
    class_node.decorator_list = []
    namespace = {"collections": collections, "re": re, "TensorLayout": Layout}
    compiled = compile(ast.Module([class_node], []), "keras", "exec")
    exec(compiled, namespace)
    return namespace["LayoutMap"]


class Layout:
    """As Keras's TensorLayout."""

    def __init__(self, axes, device_mesh=None):
        self.axes = axes
        self.device_mesh = device_mesh


KEYS = (
    *(
        ".*",
        ".*kernel",
        "dense.*",
        r"dense_\d/kernel",
        "dense_1/kernel",
        "(out|dense).*bias",
        "kernel",
        "dense_1/.*",
    ),
    *(
        "(?ix) dense_1 . kernel  # both flags",
        "a|b",
        "dense_1",
        ".*/kernel$",
        "^out/.*",
        "(?i)DENSE.*",
        "",
    ),
    *(r"out/dense\.x/bias", "dense.1/kernel"),
)
PATHS = (
    "dense_1/kernel",
    "dense_12/kernel",
    "out/dense_1/bias",
    "dense_1/kernel_scale",
    "out/dense.x/bias",
    "b",
)
AXES = st.sampled_from([(None, "model"), ("model", None), ("data", "model"), ()])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), AXES, max_size=5))
def test_a_layout_map_decides_as_keras_does(layout_map, layouts):
    theirs = layout_map(object())
    for key, axes in layouts.items():
        theirs[key] = axes
    ours = keras.rules_of(theirs)
    mesh = MeshSpec({"data": 2, "model": 4})
    for path in PATHS:
        struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        tree = {path: struct}
        try:
            layout = theirs[path]
        except ValueError:
            with pytest.raises(
                RuleError, match="in a LayoutMap it may match one key only"
            ):
                plan(tree, mesh, paths=ours)
            continue
        if layout is None:
            expected = P()
        else:
            expected = P(*layout.axes)
        (leaf,) = plan(tree, mesh, paths=ours).leaves
        expected_spec = tuple(expected)[: len(leaf.spec)]
        assert tuple(leaf.spec) == expected_spec, path
        assert not any(expected[len(leaf.spec) :]), path


def test_the_page_about_eformer_has_each_name_of_escale():
    text = (folder_of("eformer") / "escale" / "__init__.py").read_text()
    module = ast.parse(text)
    (names,) = [
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    page = (
        Path(__file__).parents[2].joinpath("docs", "migrating_eformer.md").read_text()
    )
    words = set(re.findall(r"\w+", page))
    assert len(names) >= 45
    assert [name for name in names if name not in words] == []
