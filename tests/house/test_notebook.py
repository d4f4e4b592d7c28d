"""The notebook of the docs is what its cells show now."""

import json

import draw_notebook


def test_the_notebook_shows_what_its_cells_print():
    stored = json.loads(draw_notebook.NOTEBOOK.read_text())
    sources = [cell["source"] for cell in stored["cells"]]
    assert sources == list(draw_notebook.CELLS)
    names: dict[str, object] = {}
    shown = 0
    for cell in stored["cells"]:
        if cell["cell_type"] != "code":
            continue
        now = draw_notebook.outputs_of(cell["source"], names)
        output_types = [output["output_type"] for output in cell["outputs"]]
        assert output_types == [output["output_type"] for output in now]
        for before, after in zip(cell["outputs"], now, strict=True):
            if "data" not in after:
                assert before["text"] == after["text"]
                continue
            shown += 1
            assert before["data"]["text/html"].startswith("<")
            assert after["data"]["text/html"].startswith("<")
            first = after["data"]["text/plain"].splitlines()[0]
            assert before["data"]["text/plain"].splitlines()[0] == first
    assert shown == 5
