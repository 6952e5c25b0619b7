"""`one_at_a_time` and `static_split`: a proxy before engines, as its own process.

    python -m benchmarks.one_card.swapping FILE

FILE is JSON: the table, the port, the partitions (models of each), and whether starts are fresh.
"""

import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.one_card.engines import Partition, Starter, relayed
from benchmarks.one_card.player import MODEL_HEADER, NO_MEMORY

LARGEST_BYTES = 64 << 20


def application(given: dict[str, Any]) -> web.Application:
    starter = Starter(given["table"], given["is_fresh"])
    partitions = [Partition(starter) for _ in given["partitions"]]
    of_model = {
        model: partition
        for models, partition in zip(given["partitions"], partitions, strict=True)
        for model in models
    }

    async def serve(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        partition = of_model.get(request.headers[MODEL_HEADER])
        if partition is None:
            return web.Response(status=NO_MEMORY, text="its model has no part of the card")
        async with partition.use(request.headers[MODEL_HEADER]) as engine:
            return await relayed(request, body, engine)

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"loads": sum(p.loads for p in partitions)})

    async def end(app: web.Application) -> None:
        for partition in partitions:
            await partition.end()
        starter.close()

    app = web.Application(client_max_size=LARGEST_BYTES)
    app.router.add_get("/health", health)
    app.router.add_post("/{path:.*}", serve)
    app.on_cleanup.append(end)
    return app


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    web.run_app(application(given), host="127.0.0.1", port=given["port"], print=None)


if __name__ == "__main__":
    main()
