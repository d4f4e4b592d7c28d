"""`python -m benchmarks.store_gap`: how many bytes a request to a store is worth.

One object has 512 arrays of 64 KiB that are loaded, with arrays of another size between
them that are not. The arrays are read one by one, and joined with what lies between
them. The gap at which both take the same time is the number of bytes that a request
costs. A server on loopback answers each request after `--milliseconds`.
"""

import argparse
import functools as ft
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from shardfx import checkpoint

from . import _load_stores


ARRAYS = 512
ARRAY_BYTES = 64 * 1024
GAP_KIBIBYTES = (64, 128, 256, 512)
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_gap", description=__doc__
    )
    parser.add_argument("--milliseconds", type=float, default=20.0)
    flags = parser.parse_args(arguments)
    print("gap in KiB  one by one  joined  one by one over joined")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for gap in GAP_KIBIBYTES:
            (root / str(gap)).mkdir()
            _write(root / str(gap) / "model.safetensors", gap * 1024)
        with _load_stores.served(root, flags.milliseconds / 1000) as endpoint:
            for gap in GAP_KIBIBYTES:
                place = _load_stores.place_of(endpoint, f"{gap}/")
                alone, joined = _seconds(place, gap * 1024)
                print(f"{gap:10} {alone:11.3f} {joined:7.3f} {alone / joined:23.2f}")
    return 0


def _write(path: Path, gap_bytes: int) -> None:
    """Writes a file of zeros, which takes no place on the disk."""
    header = {}
    offset = 0
    for number in range(ARRAYS):
        for name, nbytes in (("read", ARRAY_BYTES), ("gap", gap_bytes)):
            header[f"{name}.{number}"] = {
                "dtype": "U8",
                "shape": [nbytes],
                "data_offsets": [offset, offset + nbytes],
            }
            offset += nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + offset)
    assert os.path.getsize(path) == 8 + len(text) + offset


def _seconds(place: dict[str, object], gap_bytes: int) -> tuple[float, float]:
    """The median seconds of loads that read each array alone, and of loads that read
    what lies between them, too. Both take turns.
    """
    index = checkpoint.read_index(place)
    sharding = SingleDeviceSharding(jax.devices()[0])
    structs = {
        f"read.{number}": jax.ShapeDtypeStruct(
            (ARRAY_BYTES,), "uint8", sharding=sharding
        )
        for number in range(ARRAYS)
    }
    load = ft.partial(checkpoint.load, index, structs, unread="allow")
    seconds: dict[int, list[float]] = {1: [], gap_bytes + 1: []}
    for _ in range(ROUNDS + 1):
        for gap, taken in seconds.items():
            begin = time.perf_counter()
            result = jax.block_until_ready(load(gap_bytes=gap))
            taken.append(time.perf_counter() - begin)
            del result
            gc.collect()
    alone, joined = [statistics.median(taken[1:]) for taken in seconds.values()]
    return alone, joined


if __name__ == "__main__":
    raise SystemExit(main())
