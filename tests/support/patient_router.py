"""The router of capabilities, for tests of what goes where by rank alone."""

from deployments.routing.router import ResidentRouter
from tests.support.waits import WITHIN_S


class PatientRouter(ResidentRouter):
    """Passes over no replica because a busy machine holds it up: such a replica may take longer
    than the half second of its base to say how many calls it has."""

    queue_len_response_deadline_s = WITHIN_S
