"""A second process in which a compiler runs, and the questions to it.

A compiler can abort its process, so it never runs in the user's. The process reads
requests from standard input and writes answers to standard output. Each is a line of
JSON followed by bytes.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence


class Worker:
    """The process in which a compiler runs, for one thread at a time. It ends with this
    object, and with Python.

    `arguments` are the path of its Python program, and the program's arguments. The
    process keeps its files in `folder`, if it has one, which is removed after it.
    """

    def __init__(self, arguments: Sequence[str], folder: str | None = None):
        self._lock = threading.Lock()
        # `-P`: modules must not be imported from its folder.
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._end = weakref.finalize(self, _end, self._process, folder, os.getpid())

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def end(self) -> None:
        """Ends the process and removes its folder."""
        self._end()

    def ask(self, module: bytes, request: dict[str, object]) -> tuple[list[bytes], str]:
        """The texts that answer a request about `module`, and an error text. `request`
        has the entries that the process reads, such as "devices" and "dumped".
        """
        source = self._process.stdout
        sink = self._process.stdin
        assert source is not None and sink is not None
        with self._lock:
            is_answered = False
            try:
                sink.write(
                    json.dumps(request | {"size": len(module)}).encode()
                    + b"\n"
                    + module
                )
                sink.flush()
                answer = json.loads(source.readline())
                texts = [source.read(size) for size in answer["sizes"]]
                if [len(text) for text in texts] != answer["sizes"]:
                    raise EOFError("its answer is cut off")
                is_answered = True
                return texts, answer["error"]
            except (OSError, ValueError, EOFError, LookupError, TypeError) as error:
                # An answer may also lack its entries, or hold others.
                return [], f"the process that asks the compiler ended ({error!r})"
            finally:
                # An unread answer, for example after Ctrl-C, would be read as the
                # answer to the next request.
                if not is_answered:
                    self._end()


def _end(process: subprocess.Popen[bytes], folder: str | None, owner: int) -> None:
    """Closes the pipes to a process, waits for its end, and kills it if it takes more
    than 5 seconds. Does nothing in a fork of the process `owner`, which started it.
    """
    if owner != os.getpid():
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is None:
            continue
        # `close` writes what is buffered, which fails if the process is gone.
        with contextlib.suppress(OSError):
            pipe.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
