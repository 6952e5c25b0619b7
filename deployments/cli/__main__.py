"""`python -m deployments.cli`: the same as the `arbiter` command."""

import sys

from deployments.cli.main import main

sys.exit(main())
