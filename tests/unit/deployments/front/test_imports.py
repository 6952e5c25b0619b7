"""What the front's process imports when it starts."""

import subprocess
import sys

MODEL = {"name": "m", "answer_tokens": 1, "prompt_price": 1.0, "answer_price": 1.0}
ROW = {"url": "https://a.example", "models": {"m": MODEL}, "budget": {"tokens": 1}}
TABLE = {"hosts": ["a.example"], "rows": {"cloud": ROW}}
CODE = (
    "import sys\n"
    "from deployments.front import ingress\n"
    "from deployments.config.remotes_section import RemotesConfig\n"
    "from deployments.remotes.remotes import Remotes\n"
    "print(*sys.modules)\n"
    f"Remotes().configure(RemotesConfig.model_validate({TABLE}))\n"
    "print(*sys.modules)\n"
)


def test_only_a_front_with_remotes_imports_what_asks_them_and_before_a_request() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120
    )
    without, with_remotes = (set(line.split()) for line in done.stdout.splitlines())
    assert "deployments.front.ingress" in without
    assert not {"aiohttp", "arbiter.core.state", "arbiter.server.store"} & without
    assert {"aiohttp", "deployments.remotes.exchange"} <= with_remotes
