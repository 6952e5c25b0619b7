"""A front of this machine over https, whose certificate the operator's own authority has signed."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from deployments.client import Client, FrontUnreachable
from tests.support.command_line import Run
from tests.support.scripted_front import ScriptedFront

pytestmark = pytest.mark.spec("L1")


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return tmp_path / "authority.pem"


@pytest.fixture
def url(authority: Path) -> Iterator[str]:
    """Of a front that has one model, `m`."""
    ours, certified = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.cert_pem.write_to_path(str(authority))
    ours.issue_cert("127.0.0.1").configure_cert(certified)
    script = ScriptedFront()
    script.says("POST", "/arbiter/models/load/m", {"model": "m"})
    script.says("GET", "/v1/models", {"data": []})
    with script.serving(certified) as served:
        yield served


def test_command_trusts_the_authorities_of_ssl_cert_file(
    run: Run, owner: str, url: str, authority: Path
) -> None:
    assert run("load", "m", "--url", url, SSL_CERT_FILE=str(authority)).exit_code == 0
    refused = run("load", "m", "--url", url)
    assert refused.exit_code == 1 and "certificate verify failed" in refused.stderr


def test_client_of_python_trusts_the_authorities_of_ssl_cert_file(
    url: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(url, key="") as client, pytest.raises(FrontUnreachable, match="verify failed"):
        client.models()
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with Client(url, key="") as client:
        assert client.models() == ()
