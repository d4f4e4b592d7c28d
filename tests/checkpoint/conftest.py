from collections.abc import Iterator

import jax
import numpy as np
import pytest
from _servers import (
    ACCESS_KEY,
    SECRET_KEY,
    Proxy,
    Server,
    gcs_server,
    proxied,
    s3_server,
)
from jax.sharding import Mesh


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """All devices along one axis."""
    return Mesh(np.array(jax.devices()), ("x",))


@pytest.fixture(scope="session")
def _credentials() -> Iterator[pytest.MonkeyPatch]:
    """What TensorStore reads from the environment, once per process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patched.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patched.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patched.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        yield patched


@pytest.fixture(scope="session")
def s3(_credentials: pytest.MonkeyPatch) -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def gcs(_credentials: pytest.MonkeyPatch) -> Iterator[Server]:
    with gcs_server() as server:
        _credentials.setenv("TENSORSTORE_GCS_HTTP_URL", server.endpoint)
        yield server


@pytest.fixture(scope="session")
def _proxied(s3: Server) -> Iterator[tuple[Server, Proxy]]:
    with proxied(s3) as pair:
        yield pair


@pytest.fixture
def behind_proxy(_proxied: tuple[Server, Proxy]) -> Iterator[tuple[Server, Proxy]]:
    """The S3 server behind a proxy that does nothing yet."""
    yield _proxied
    _proxied[1].clear()


@pytest.fixture(params=["s3", "gcs"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)
