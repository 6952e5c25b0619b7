"""A driver of its own process that holds a model, as a notebook or a script does.

python -m tests.support.model_driver ADDRESS CAPABILITY MODEL

Prints the ticket once the model serves, which stays in use until a line comes; each further line
that it reads is one more use, and its answer the ticket again.
"""

import asyncio
import sys

import ray

from deployments.replica.residency import Residency


async def main(address: str, capability: str, model: str) -> None:
    ray.init(address=address, log_to_driver=False)
    residency = Residency.start(capability)
    while True:
        async with residency.use(model) as use:
            print(use.ticket, flush=True)
            line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            return await residency.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
