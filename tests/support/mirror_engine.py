"""An engine that answers with the headers and the body that it was sent."""

from deployments.engines.asgi import respond
from deployments.engines.protocol import Config, Receive, Scope, Send
from tests.support.fake_engine import FakeEngine


class MirrorEngine(FakeEngine):
    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"].decode()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        await respond(send, 200, {"headers": headers, "body": body})


def build(config: Config) -> FakeEngine:
    return MirrorEngine(config)
