"""`python -m benchmarks.store_hosts`: what several processes of one host read from a
store, and the processor time that it takes, if each needs all arrays.

- `each`: every process loads from the store.
- `copy`: one process copies the checkpoint to `/dev/shm`, and all load the copy.
- `share`: every process copies some of the files to `/dev/shm`, and all load the copy.
- `reshard`: every process loads a part of each array, and a `reshard` sends the parts.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec as P

from shardfx import PathRules, checkpoint, plan, reshard

from . import _load_stores


WAYS = ("each", "copy", "share", "reshard")
DEVICES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_hosts", description=__doc__
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--of", nargs="*", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.of:
        way, number, port, endpoint, copy = flags.of
        _run(
            way=way,
            number=int(number),
            processes=flags.processes,
            port=port,
            endpoint=endpoint,
            copy=Path(copy),
        )
        return 0
    print("way      bytes over state  requests  processor seconds of each process")
    root = _load_stores.folder(flags.mebibytes)
    state_bytes = checkpoint.read_index(root / "set").bytes_total
    with _load_stores.served(root) as endpoint:
        for way in WAYS:
            seconds = _processor_seconds(way, flags, endpoint)
            ranges = _load_stores.stats(endpoint)
            read_bytes = sum(nbytes for _, nbytes in ranges) / state_bytes
            print(f"{way:8} {read_bytes:16.2f} {len(ranges):9}  {seconds}")
    return 0


def _processor_seconds(
    way: str, flags: argparse.Namespace, endpoint: str
) -> list[float]:
    """Starts the processes, and returns the processor time that each tells."""
    port = str(_free_port())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as copy:
        command = [sys.executable, "-m", "benchmarks.store_hosts"]
        command += ["--processes", str(flags.processes), "--of", way]
        children = [
            subprocess.Popen(
                [*command, str(number), port, endpoint, copy],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(flags.processes)
        ]
        texts = [child.communicate()[0] for child in children]
    return [round(float(text.splitlines()[-1]), 2) for text in texts]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _run(
    way: str, number: int, processes: int, port: str, endpoint: str, copy: Path
) -> None:
    """One process of the host."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, processes, number, coordinator_bind_address=address
    )
    mesh = Mesh(np.array(jax.devices()), ("x",))
    index = checkpoint.read_index(_load_stores.place_of(endpoint, "set/"))
    structs = checkpoint.structs(index)
    whole = plan(structs, mesh, paths=PathRules([(".*", P())]))
    parts = plan(structs, mesh, paths=PathRules([(".*", P("x"))]))
    # What was read so far are headers.
    multihost_utils.sync_global_devices("headers")
    if number == 0:
        _load_stores.stats(endpoint)
    multihost_utils.sync_global_devices("begin")
    begin = time.process_time()
    if way == "each":
        result = checkpoint.load(index, whole)
    elif way in ("copy", "share"):
        if way == "share":
            _copy(
                endpoint=endpoint,
                index=index,
                copy=copy,
                number=number,
                processes=processes,
            )
        elif number == 0:
            _copy(endpoint=endpoint, index=index, copy=copy, number=0, processes=1)
        multihost_utils.sync_global_devices("copied")
        result = checkpoint.load(copy, whole)
    else:
        result = reshard(checkpoint.load(index, parts), whole)
    jax.block_until_ready(result)
    seconds = time.process_time() - begin
    multihost_utils.sync_global_devices("end")
    print(f"\n{seconds}", flush=True)


def _copy(
    endpoint: str, index: checkpoint.Index, copy: Path, number: int, processes: int
) -> None:
    """Copies every file whose number is that of the process."""
    import tensorstore as ts

    place = _load_stores.place_of(endpoint, "set/")
    store = ts.KvStore.open(place).result()
    names = {Path(entry.file).name for entry in index.entries}
    for name in sorted(names)[number::processes]:
        with open(copy / name, "wb") as file:
            file.write(store.read(name).result().value)
    files = {entry.path: Path(entry.file).name for entry in index.entries}
    text = json.dumps({"weight_map": files})
    (copy / "model.safetensors.index.json").write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
