"""What a Ray worker imports before its first task (RAY_preload_python_modules): Serve's replica
and what ours adds to it.

While a request waits for a replica's first answer, the replica's process is busy importing, unless
it was started ahead of need (arbiter/node/spare_workers.py); then these imports delay no request.
The garbage collector would walk all imported objects again and again, find nothing, and take a
sixth of that time; so it pauses during the imports, and afterwards skips what stays for ever.
"""

import gc

gc.disable()
import ray.serve._private.replica  # noqa: E402, F401

import arbiter.server.actor  # noqa: E402, F401  # of which a replica gets a handle
import deployments.replica.capability  # noqa: E402, F401

gc.freeze()
gc.enable()
