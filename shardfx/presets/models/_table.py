"""Every model by name: its family, and the numbers of its config, from `table.txt` beside this file.

The numbers are those of the checkpoints' own config.json; of GPT-3 those of its paper (arXiv:2005.14165, table 2.1), of
T5 those of t5x's gin files, of ViT those of big_vision's models/vit.py. There is one llama3-405b, Llama 3.1's.
big_vision tells ViT "g" from "G"; the others call the large one "bigG".
"""

import importlib.resources
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


# A family with the names of its numbers, those that all its models share with their values; then a model in each row.
_TEXT = importlib.resources.files("shardfx.presets.models").joinpath("table.txt").read_text(encoding="utf-8")


class ModelRow(NamedTuple):
    """A model: its family's name, and the numbers in which it differs from other models of the family."""

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
