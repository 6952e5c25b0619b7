"""The image capability: text or a picture in, pictures out, by diffusers in its engine."""

from deployments.replica.adapted_capability import AdaptedCapability


class ImageServer(AdaptedCapability):
    paths = frozenset({"/v1/images/generations", "/v1/images/edits", "/v1/images/variations"})
