"""The table of published models: for each model name its family and the numbers of its config, read from `table.txt`.

The numbers are from each checkpoint's config.json, except: GPT-3 from its paper (arXiv:2005.14165, table 2.1), T5 from
t5x's gin files, ViT from big_vision's models/vit.py. `llama3-405b` is Llama 3.1 405B, since Llama 3 has no such model.
big_vision distinguishes ViT "g" and "G"; other libraries call the larger one "bigG".
"""

import importlib.resources
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


# The text has a header line per family: the names of its numbers, and `name=value` for numbers that all its models
# share. Then follows a line per model, with its numbers in that order.
_TEXT = importlib.resources.files("shardfx.presets.models").joinpath("table.txt").read_text(encoding="utf-8")


class ModelRow(NamedTuple):
    """A published model: the name of its family, and the numbers of its config."""

    family: str
    config: Mapping[str, int]


def _rows() -> Iterator[tuple[str, ModelRow]]:
    family, names, same = "", list[str](), dict[str, int | bool]()
    for line in _TEXT.replace("\n+", "").splitlines():
        first, *words = line.split()
        if first.endswith(":"):
            family, names = first[:-1], [word for word in words if "=" not in word]
            same = {name: _number(text) for name, _, text in (word.partition("=") for word in words) if text}
        else:
            yield first, ModelRow(family, MappingProxyType(dict(zip(names, map(_number, words), strict=True)) | same))


def _number(text: str) -> int | bool:
    return text == "True" if text in ("True", "False") else int(text)


TABLE: Final[Mapping[str, ModelRow]] = MappingProxyType(dict(_rows()))
