"""Files of other formats, told by their first bytes, and what to do with each."""

import os
from typing import NamedTuple

from .._ground.text import quoted
from ._place import Place


_HEAD_BYTES = 32


class Kind(NamedTuple):
    """A kind of file that this package does not read.

    - `name`: what it is.
    - `fix`: what to do.
    """

    name: str
    fix: str


_TORCH = (
    "a pickle is a program, so it is not read here; in PyTorch,"
    " `safetensors.torch.save_file(torch.load(path, weights_only=True), new_path)`"
)
_NUMPY = "`safetensors.numpy.save_file(dict(numpy.load(path)), new_path)` converts it"
# The first bytes of each kind of file. Longer ones come before their own beginnings.
_KINDS: tuple[tuple[bytes, Kind], ...] = (
    (
        b"version https://git-lfs",
        Kind(
            "a pointer of Git LFS, and not the weights",
            "run `git lfs pull` in the clone, or `hf download` the model",
        ),
    ),
    (
        b"GGUF",
        Kind(
            "a GGUF file of llama.cpp",
            "take the safetensors of the model, or convert it by `transformers`:"
            " `AutoModelForCausalLM.from_pretrained(directory, gguf_file=name)`",
        ),
    ),
    (
        b"PK\x03\x04",
        Kind("a zip file, as of `torch.save` or `numpy.savez`", f"{_TORCH}; {_NUMPY}"),
    ),
    (b"\x93NUMPY", Kind("an array of `numpy.save`", _NUMPY)),
    (
        b"\x89HDF\r\n\x1a\n",
        Kind("an HDF5 file, as of Keras", "write its arrays by `safetensors.numpy`"),
    ),
    (b"\x1f\x8b", Kind("a gzip file", "unpack it first")),
    (b"\x28\xb5\x2f\xfd", Kind("a zstd file", "unpack it first")),
    (b"<", Kind("a page of HTML or XML", "the download failed; download it again")),
)
_MSGPACK = Kind(
    "a msgpack file, as of flax",
    "give it a name that ends in .msgpack; if it is damaged, write it again, or convert"
    " it: `flax.serialization.msgpack_restore`, then `safetensors.flax.save_file`",
)
_PICKLE = Kind("a pickle, as of an older `torch.save`", _TORCH)


def kind_of(head: bytes) -> Kind | None:
    """The kind of a file from its first bytes; `None` if they say nothing."""
    if not head:
        return Kind("an empty file", "its download or its save failed; get it again")
    for start, kind in _KINDS:
        if head.startswith(start):
            return kind
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return _PICKLE
    if is_msgpack_map(head):
        return _MSGPACK
    return None


def is_msgpack_map(head: bytes) -> bool:
    """Whether the first bytes of a file begin a msgpack map with a text as its first
    key.

    The first byte is 0x80 plus the number of keys, or announces this number in the 2 or
    4 bytes after it.
    """
    sizes = {0xDE: 3, 0xDF: 5}
    if not head:
        return False
    is_short = 0x81 <= head[0] <= 0x8F
    start = 1 if is_short else sizes.get(head[0], 0)
    if not start or len(head) <= start:
        return False
    first = head[start]
    return 0xA0 <= first <= 0xBF or first in (0xD9, 0xDA, 0xDB)


def recognised_files(place: Place, names: list[str]) -> list[str]:
    """Each of the named files in a checkpoint's directory whose first bytes tell what
    it is, as text: `'model.gguf' is a GGUF file of llama.cpp: ...`.
    """
    texts = []
    for name in names:
        if not place.has_file(os.path.join(place.directory, name)):
            continue
        with place.opened(place.inside(name)) as file:
            kind = kind_of(file.read(_HEAD_BYTES, 0))
        if kind is not None:
            texts.append(f"{quoted(name)} is {kind.name}: {kind.fix}")
    return texts
