"""The proxies for TLS of docs/deploy.md as programs: each with the block of that page, a
certificate made here, and a unix socket in place of its port, so that no two tests meet.
"""

import os
import pwd
import re
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import trustme

from tests.support.tools import tool

ROOT = Path(__file__).parents[2]
NAME, FRONT = "ai.example.org", "127.0.0.1:8000"  # as the page has them
STARTED_WITHIN_S, ANSWERED_S = 60.0, 60.0
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.M | re.S)

CADDY = """{{
    admin off
    auto_https disable_redirects
    servers {{
        protocols h1 h2
    }}
}}
{block}
"""
NGINX = """daemon off;
{user}
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    {temporary}
    server {{
        listen unix:{folder}/tls ssl;
        server_name {name};
        ssl_certificate {folder}/cert.pem;
        ssl_certificate_key {folder}/key.pem;
{block}
    }}
}}
"""


def block(program: str) -> str:
    """What the page has for a program."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    start = {"caddy": "\n" + NAME, "nginx": "\nlocation /"}[program]
    [found] = [part for part in _BLOCK.findall(text) if f"\n{part}".startswith(start)]
    return str(found)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy, and whom its clients trust."""

    place: Path
    trusted: ssl.SSLContext

    def connect(self) -> HTTPConnection:
        """After a handshake in which its certificate was good for the name. Raises OSError."""
        connection = HTTPConnection(NAME, timeout=ANSWERED_S)
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(ANSWERED_S)
        plain.connect(str(self.place))
        connection.sock = self.trusted.wrap_socket(plain, server_hostname=NAME)
        return connection


@contextmanager
def proxy_before(port: int, program: str) -> Iterator[Proxy]:
    """The program, before a front on that port. Skips the test where it is not installed."""
    path = tool(program)
    with tempfile.TemporaryDirectory(prefix="tls-") as name:
        folder, authority = Path(name), trustme.CA()
        made = authority.issue_cert(NAME)
        made.private_key_pem.write_to_path(folder / "key.pem")
        for pem in made.cert_chain_pems:
            pem.write_to_path(folder / "cert.pem", append=True)
        text = block(program).replace(FRONT, f"127.0.0.1:{port}")
        words = {"caddy": _caddy, "nginx": _nginx}[program](folder, text)
        trusted = ssl.create_default_context()
        authority.configure_trust(trusted)
        proxy = Proxy(folder / "tls", trusted)
        env = os.environ | {"HOME": name, "XDG_DATA_HOME": name, "XDG_CONFIG_HOME": name}
        with (folder / "log").open("w+b") as log:
            process = subprocess.Popen([path, *words], env=env, stdout=log, stderr=log)
            try:
                _until_up(proxy, process, folder / "log")
                yield proxy
            finally:
                process.terminate()
                process.wait(STARTED_WITHIN_S)


def _caddy(folder: Path, text: str) -> list[str]:
    ours = f"    tls {folder}/cert.pem {folder}/key.pem\n    bind unix/{folder}/tls\n}}"
    (folder / "Caddyfile").write_text(CADDY.format(block=text.rstrip().removesuffix("}") + ours))
    return ["run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


def _nginx(folder: Path, text: str) -> list[str]:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    # Its workers are another user's where it is started by root, and could not read the folder.
    user = f"user {pwd.getpwuid(0).pw_name};" if os.getuid() == 0 else ""
    fill = {"user": user, "folder": folder, "temporary": temporary, "name": NAME, "block": text}
    (folder / "nginx.conf").write_text(NGINX.format(**fill))
    return ["-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def _until_up(proxy: Proxy, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """It accepts connections."""
    waited = threading.Event()
    for _ in range(int(STARTED_WITHIN_S / 0.05)):
        assert process.poll() is None, f"it ended: {log.read_text()[-2_000:]}"
        try:
            proxy.connect().close()
            return
        except OSError:
            waited.wait(0.05)
    raise AssertionError(f"no handshake in {STARTED_WITHIN_S:.0f} s: {log.read_text()[-2_000:]}")
