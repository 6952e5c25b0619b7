"""S3 on this machine: moto's server, in a process of its own so that it can hang and end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from tests.support.ports import free_port
from tests.support.waits import wait_in_thread

BUCKET = "our-loras"
ANYONE = ("test", "test")  # believed, except where it is `checked`
# Read by s3fs, as on a machine of AWS but for the address.
_REGION = "eu-central-1"
_OTHERS = {"AWS_DEFAULT_REGION": _REGION, "AWS_EC2_METADATA_DISABLED": "true"}
_MAY_ALL = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}


def variables(port: int, credentials: tuple[str, str] = ANYONE) -> dict[str, str]:
    """For a process that asks the server on this port."""
    key, secret = credentials
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **_OTHERS}
    return {**environment, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}


@dataclass
class S3Server:
    """A running server with an empty bucket."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """A file system of its own, whatever the environment says."""
        key, secret = ANYONE
        where = {"endpoint_url": self.url, "client_kwargs": {"region_name": _REGION}}
        return fsspec.filesystem("s3", key=key, secret=secret, skip_instance_cache=True, **where)

    def upload(self, folder: Path, name: str) -> None:
        client = self.client()
        for file in folder.iterdir():
            client.pipe_file(f"{BUCKET}/{name}/{file.name}", file.read_bytes())

    def answers(self) -> bool:
        assert self.process.poll() is None, "moto's server ended"
        try:
            with urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=60):
                return True
        except OSError:
            return False

    @contextlib.contextmanager
    def checked(self) -> Iterator[tuple[str, str]]:
        """It refuses who has no good signature. Gives the credentials of a user who may
        read the bucket."""
        self._ask_iam("CreateUser")
        policy = json.dumps({"Version": "2012-10-17", "Statement": [_MAY_ALL]})
        self._ask_iam("PutUserPolicy", PolicyName="all", PolicyDocument=policy)
        made = self._ask_iam("CreateAccessKey")
        parts = (re.search(f"<{name}>(.+?)</", made) for name in ("AccessKeyId", "SecretAccessKey"))
        key, secret = (match[1] for match in parts if match)
        self._check_after(b"0")
        try:
            yield key, secret
        finally:
            self._check_after(b"inf")

    def _check_after(self, requests: bytes) -> None:
        self.post("/moto-api/reset-auth", requests, {"content-type": "text/plain"})

    def _ask_iam(self, action: str, **fields: str) -> str:
        fields |= {"Action": action, "Version": "2010-05-08", "UserName": "replica"}
        scope = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/iam/aws4_request"
        signed = {"authorization": f"{scope}, SignedHeaders=host, Signature=0"}
        return self.post("/", urllib.parse.urlencode(fields).encode(), signed)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self.url + path, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """Its kernel takes connections, and nothing answers them."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def s3_server(log: Path, port: int | None = None) -> Iterator[S3Server]:
    """`log`: a file for what it prints."""
    port = port or free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | variables(port)
        )
    server = S3Server(port, process)
    try:
        wait_in_thread(server.answers)
        server.client().mkdir(BUCKET)
        yield server
    finally:
        process.kill()
        process.wait(60)
