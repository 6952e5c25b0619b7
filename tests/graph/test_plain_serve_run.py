"""The shipped configuration by the bare command, as a person runs it who has read no Makefile."""

import contextlib
import os
import subprocess
import tempfile
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from models import shipped
from models.make_models import default_folder
from tests.graph.conftest import BIN, ROOT, Graph, free_port, stop, until

HELLO = [{"role": "user", "content": "hi"}]
CHAT = {"model": "small-chat", "messages": HELLO, "max_tokens": 2, "temperature": 0}
EMBED = {"model": "all-minilm-l6-v2", "input": "hi"}


@contextlib.contextmanager
def plain_serve_run() -> Iterator[Graph]:
    """With a home and a place for temporary files of its own, by which Ray finds no other cluster,
    and no other variable than those and the PATH. Of the file only the port is changed."""
    text = (ROOT / "serve_config.yaml").read_text()
    assert text.count("port: 8000") == 1
    with tempfile.TemporaryDirectory(prefix="plain-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        made = home / ".cache" / "serve-arbiter"
        made.mkdir(parents=True)
        shipped.unpack_all(default_folder())  # as `make models` does
        (made / "models").symlink_to(default_folder())
        port = free_port()
        file = home / "serve_config.yaml"
        file.write_text(text.replace("port: 8000", f"port: {port}"))
        log = (home / "serve.log").open("wb")
        process = subprocess.Popen(
            [BIN / "serve", "run", file],
            cwd=ROOT,
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.environ["PATH"]},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        config = yaml.safe_load(text)
        running = Graph(f"http://127.0.0.1:{port}", process, home, config)
        try:
            yield running
        finally:
            stop(process)


def is_up(graph: Graph) -> bool:
    log = graph.folder / "serve.log"
    assert graph.process.poll() is None, f"serve run ended: {log.read_text()[-2000:]}"
    try:
        return {"chat", "embedding"} <= set(graph.get("/ready")["capabilities"])
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.spec("H0")
def test_plain_serve_run_without_a_variable_answers_chat_and_embeddings() -> None:
    with plain_serve_run() as graph:
        until(lambda: is_up(graph), 120, "the front answers")
        until(lambda: graph.state()["devices"], 60, "the node has introduced itself")
        status, said = graph.post("/v1/chat/completions", CHAT)
        assert status == 200, said
        assert said["usage"]["completion_tokens"] == 2
        status, said = graph.post("/v1/embeddings", EMBED)
        assert status == 200, said
        assert len(said["data"][0]["embedding"]) == 384
        models = {t["model"] for t in graph.state()["tickets"]}
        assert models & {"small-chat", "all-minilm-l6-v2"}
