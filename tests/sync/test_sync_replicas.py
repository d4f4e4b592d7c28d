"""An engine of four processes whose replicas pull each element once, and spread it."""

import itertools
import socket
import threading
import time
from pathlib import Path

import _processes
import jax
import pytest
import replica_worker as worker

from shardfx import MeshSpec
from shardfx.sync import Sender


ENGINE = MeshSpec({"replica": worker.PROCESSES, "model": 2})


def trainer_mesh():
    return MeshSpec({"data": 2, "model": 2}).build(jax.devices()[:4])


class Relay:
    """A port that passes connections on to `address`, and counts what comes back."""

    def __init__(self, address):
        self.address = address
        self.received = 0
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept_all)]
        self._threads[0].start()

    def _accept_all(self):
        with self._listening:
            while True:
                try:
                    receiver, _ = self._listening.accept()
                except OSError:
                    return
                thread = threading.Thread(target=self._pass_both_ways, args=(receiver,))
                self._threads.append(thread)
                thread.start()

    def _pass_both_ways(self, receiver):
        with receiver, socket.create_connection(self.address) as sender:
            requests = threading.Thread(target=pass_on, args=(receiver, sender))
            requests.start()
            count = pass_on(sender, receiver)
            requests.join()
        with self._lock:
            self.received += count

    def close(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


def pass_on(source, target):
    """Passes bytes on until one side ends the connection. Returns how many."""
    count = 0
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
            count += len(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    return count


def test_divided_replicas_need_each_element_once():
    src, dst, divided = worker.plans(MeshSpec({"data": 2, "model": 2}), ENGINE)
    transfers = worker.transfers(src, dst, divided)
    sizes = {leaf.path: leaf.bytes for leaf in dst.leaves}
    # Four replicas divide these, and no dimension of the others.
    once = sum(sizes[path] for path in ("kernel", "row", "keys"))
    each = sum(sizes[path] for path in ("odd", "scalar"))
    assert transfers["direct"].wire_bytes == worker.PROCESSES * (once + each)
    assert transfers["divided"].wire_bytes == once + worker.PROCESSES * each


@pytest.mark.processes
def test_replicas_that_pull_once_get_what_each_would_pull(tmp_path):
    src, dst, divided = worker.plans(trainer_mesh(), ENGINE)
    transfers = worker.transfers(src, dst, divided)
    senders = {route: Sender(plan, worker.SECRET) for route, plan in transfers.items()}
    relays = {route: Relay(sender.address) for route, sender in senders.items()}
    for route, relay in relays.items():
        Path(tmp_path, f"{route}.port").write_text(str(relay.port))
    has_ended = threading.Event()

    def publish_all():
        revision = 0
        while not has_ended.is_set():
            revision += 1
            arrays = jax.device_put(worker.arrays_of(revision), src.shardings)
            for sender in senders.values():
                sender.publish(arrays, revision)
            time.sleep(0.5)

    publisher = threading.Thread(target=publish_all)
    publisher.start()
    try:
        outcomes = _processes.run(
            "pulls", worker.PROCESSES, 2, tmp_path, worker=Path(worker.__file__)
        )
    finally:
        has_ended.set()
        publisher.join()
        for relay in relays.values():
            relay.close()
        for sender in senders.values():
            sender.close()
    results = []
    for outcome in outcomes:
        assert outcome.returncode == 0, outcome.log[-4000:]
        results.append(outcome.result)
    for route, transfer in transfers.items():
        pulls = list(itertools.chain.from_iterable(result[route] for result in results))
        assert all(is_right for _, is_right, _, _ in pulls)
        for turn in zip(*[result[route] for result in results], strict=True):
            assert len({revision for revision, *_ in turn}) == 1
        # What comes beside the rows is below 2 KiB a pull.
        attempts = sum(attempts for *_, attempts, _ in pulls)
        news = sum(news for *_, news in pulls)
        extra = relays[route].received - news * transfer.wire_bytes // worker.PROCESSES
        assert 0 < extra < 2048 * attempts
