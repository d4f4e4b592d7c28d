"""The README, the tour and the page on training, with a mesh as `jax.make_mesh` makes
it in place of `MeshSpec.build`, and the line that they name. What the pages assert of
losses and results holds there too.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from jax.sharding import AxisType

import shardfx as sfx
from tests.house.test_docs import ROOT
from tests.testing.test_recipes import names_of


pytestmark = pytest.mark.docs
EXPLICIT = 'jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))'
AUTO_MESH = 'sfx.MeshSpec({"data": 2, "fsdp": 2, "tensor": 2})'
TYPED_LOSS = "loss_of = sfx.auto.auto_axes(loss_of, plan, out=())"
TYPED_STEP = (
    "step = sfx.auto.auto_axes(step, plan, out=(plan.specs, opt_plan.specs, P()))"
)


class Page(NamedTuple):
    """A page, the line that it names for Explicit axes, the line of code behind it, and
    what stands in place of other code.
    """

    path: str
    line: str
    behind: str
    replaced: dict[str, str]


PAGES = [
    Page(
        path="README.md",
        line=TYPED_STEP,
        behind="step = sfx.filter_jit(\n",
        replaced={
            f"mesh = {AUTO_MESH}\n": f"mesh = {EXPLICIT}\n",
            "plan = plan.on(mesh.build(jax.devices()))\n": "",
        },
    ),
    Page(
        path="docs/tour.md",
        line=TYPED_LOSS,
        behind="def step(model, state, tokens):\n",
        replaced={
            f"here = {AUTO_MESH}\n": f"here = {EXPLICIT}\n",
            ".on(here.build(jax.devices()[:8]))\n": "\n",
        },
    ),
    Page(
        path="docs/train.md",
        line=TYPED_LOSS,
        behind="MICROBATCHES = 4\n",
        replaced={
            f"mesh = {AUTO_MESH}.build(jax.devices())\n": f"mesh = {EXPLICIT}\n",
            "smaller = spec.build(jax.devices()[:4])\n": (
                "smaller = jax.make_mesh(\n"
                "    spec.axis_sizes, spec.axis_names, devices=jax.devices()[:4]\n"
                ")\n"
            ),
        },
    ),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_a_page_works_on_a_mesh_of_make_mesh(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page.path).read_text()
    assert page.line in text, "the page names the line"
    explicit = text
    replaced = {**page.replaced, page.behind: f"{page.line}\n{page.behind}"}
    for code, other in replaced.items():
        assert explicit.count(code) == 1, code
        explicit = explicit.replace(code, other)
    typed = names_of(explicit)

    mesh = typed["plan"].jax_mesh
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert not sfx.misplaced(typed["model"], typed["plan"])
    assert not sfx.misplaced(typed["state"], typed["opt_plan"])
    assert sfx.specs_of(typed["model"]) == typed["plan"].specs
