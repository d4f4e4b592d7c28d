"""The notebook of the docs is what its cells show now."""

import collections
import html.parser
import json
import re

import draw_notebook
import jax


def test_the_notebook_shows_what_its_cells_print():
    stored = json.loads(draw_notebook.NOTEBOOK.read_text())
    sources = [cell["source"] for cell in stored["cells"]]
    assert sources == list(draw_notebook.CELLS)
    # Other versions of XLA may choose other collectives.
    is_drawn_by_this_jax = stored["metadata"]["jax"] == jax.__version__
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
            for kind, text in after["data"].items():
                stored_lines = without_libtpu(before["data"][kind])
                lines = without_libtpu(text)
                assert stored_lines[0] == lines[0]
                if is_drawn_by_this_jax:
                    assert stored_lines == lines
    assert shown == 5


def without_libtpu(text: str) -> list[str]:
    """The lines of an output without the one that depends on whether libtpu is there."""
    return [line for line in text.splitlines() if "libtpu" not in line]


class Page(html.parser.HTMLParser):
    """The text that a browser shows, and the tags that are open at its end."""

    def __init__(self, text: str):
        super().__init__()
        self.text = ""
        self.open_tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open_tags.append(tag)
        self.text += " "

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag
        self.text += " "

    def handle_data(self, data):
        self.text += data


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w./%,\[\]{}-]+", text)


def test_a_cell_shows_as_html_what_its_text_says():
    stored = json.loads(draw_notebook.NOTEBOOK.read_text())
    compared = 0
    for cell in stored["cells"]:
        for output in cell.get("outputs", ()):
            text = output.get("data", {}).get("text/plain", "ShardPlan(")
            # A plan prints one line; its table is compared with that of `report`.
            if text.startswith("ShardPlan("):
                continue
            page = Page(output["data"]["text/html"])
            assert page.open_tags == []
            words = collections.Counter(words_of(text))
            shown = collections.Counter(words_of(page.text))
            # Headers of columns say these words once.
            missing = (words - shown).keys()
            assert missing <= {"per", "device", "fix"}
            compared += 1
    assert compared == 4
