"""What a Ray worker imports before its first task (RAY_preload_python_modules): Serve's replica
and what ours adds to it.

While somebody waits for a replica's first answer, its process is busy importing, unless it was
started ahead of need (arbiter.node.spares); then all that is imported here costs nobody. The
collector goes over all that was imported again and again, finds nothing, and takes a sixth of that
time; so it pauses, and afterwards leaves alone what stays for ever.
"""

import gc

gc.disable()
import ray.serve._private.replica  # noqa: E402, F401

import arbiter.server.actor  # noqa: E402, F401  # of which a replica gets a handle
import deployments.replica.capability  # noqa: E402, F401

gc.freeze()
gc.enable()
