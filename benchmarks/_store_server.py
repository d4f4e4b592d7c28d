"""A server of S3's kind for reads, on loopback: `python -m benchmarks._store_server
DIRECTORY SECONDS` serves the files of a directory as the objects of `bucket`.

Each request waits for some seconds, as on a network. `/stats` has the ranges that were
read, and forgets them.
"""

import hashlib
import http.server
import json
import os
import sys
import threading
import time
import urllib.parse
import xml.sax.saxutils
from pathlib import Path
from typing import Any


class Threads(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def _bounds(text: str, size: int) -> tuple[int, int]:
    """The bytes that a `Range` asks for: all if there is none."""
    if not text:
        return 0, size
    first, last = text.removeprefix("bytes=").split("-")
    if not first:
        return max(0, size - int(last)), size
    if not last:
        return int(first), size
    return int(first), min(size, int(last) + 1)


def _listing(root: Path, prefix: str) -> str:
    """The names of the objects, as S3 answers."""
    names = [
        file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()
    ]
    keys = [name for name in sorted(names) if name.startswith(prefix)]
    rows = "".join(
        f"<Contents><Key>{xml.sax.saxutils.escape(key)}</Key></Contents>"
        for key in keys
    )
    return (
        f"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>"
        f"{len(keys)}</KeyCount>{rows}</ListBucketResult>"
    )


def _handler_of(seconds, root):
    ranges: list[tuple[str, int]] = []
    guard = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            if url.path == "/stats":
                with guard:
                    text = json.dumps(ranges)
                    ranges.clear()
                return self._send(200, {}, text.encode())
            time.sleep(seconds)
            name = urllib.parse.unquote(url.path).removeprefix("/bucket").strip("/")
            query = urllib.parse.parse_qs(url.query)
            if not name:
                return self._list(query.get("prefix", [""])[0])
            self._object(root / name)

        do_HEAD = do_GET

        def _object(self, file: Path) -> None:
            if not file.is_file():
                code = "<Error><Code>NoSuchKey</Code></Error>"
                return self._send(404, {}, code.encode())
            size = file.stat().st_size
            text = self.headers.get("Range", "")
            start, stop = _bounds(text, size)
            if text and start >= size:
                code = "<Error><Code>InvalidRange</Code></Error>"
                return self._send(416, {}, code.encode())
            tag = hashlib.md5(f"{file}{size}".encode()).hexdigest()
            self.send_response_only(206 if text else 200)
            self.send_header("ETag", f'"{tag}"')
            self.send_header("Content-Length", str(stop - start))
            if text:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()
            if self.command == "HEAD":
                return
            with guard:
                ranges.append((file.name, stop - start))
            with open(file, "rb") as opened:
                while start < stop:
                    start += os.sendfile(
                        self.connection.fileno(), opened.fileno(), start, stop - start
                    )

        def _list(self, prefix: str) -> None:
            body = _listing(root, prefix)
            self._send(200, {"Content-Type": "application/xml"}, body.encode())

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def main(directory: str, seconds: float) -> None:
    root = Path(directory)
    Handler = _handler_of(seconds, root)

    with Threads(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
