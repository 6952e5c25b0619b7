"""A program in the place of `serve run`: says what Ray says, answers as a front does, and ends as
it was told: `python scripted_serve_run.py HOW FILE`.

`HOW` is `ready` (until SIGINT, then status 5), `breaks` (status 7 before there is a front),
`environment` (likewise, having said its own) or `zygote` (no engine can start; until SIGINT). It
sends its parent SIGTERM before the box.
"""

import http.server
import json
import os
import signal
import sys

import yaml

STARTING, WARM = {"n": {"state": "starting"}}, {"n": {"state": "ready"}}
BROKEN = {"n": {"state": "failed", "cause": "does not start: no module"}}
SLOW_LOOKS = 3  # at /ready until the imports are done


class Front(http.server.BaseHTTPRequestHandler):
    looks = 0

    def do_GET(self) -> None:
        if self.path not in ("/health", "/ready"):
            if self.path == "/":  # the last that is asked before the box
                os.kill(os.getppid(), signal.SIGTERM)
            return self.answer(404, {})
        if self.path == "/ready":
            Front.looks += 1
        states = {"chat": {"state": "scaled_to_zero"}, "tts": {"state": "failed", "cause": "torn"}}
        warm = BROKEN if sys.argv[1] == "zygote" else WARM
        nodes = warm if Front.looks > SLOW_LOOKS else STARTING
        self.answer(200, {"capabilities": states, "nodes": nodes})

    def answer(self, status: int, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main() -> None:
    with open(sys.argv[2]) as file:
        port = yaml.safe_load(file)["http_options"]["port"]
    print(
        "Started a local Ray instance. View the dashboard at \x1b[1m\x1b[32mhttp://127.0.0.1:8265 "
    )
    sys.stdout.flush()
    if sys.argv[1] == "environment":
        print(json.dumps(dict(os.environ)))
        sys.exit(7)
    if sys.argv[1] == "breaks":
        print("the last words")
        sys.exit(7)
    try:
        http.server.HTTPServer(("127.0.0.1", port), Front).serve_forever()
    except KeyboardInterrupt:
        sys.exit(5)


if __name__ == "__main__":
    main()
