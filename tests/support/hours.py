"""Hours for tests that run at any time of day."""

from datetime import UTC, datetime


def hours_away() -> str:
    """A window of an hour that begins in five to six hours."""
    begins = (datetime.now(UTC).hour + 6) % 24
    return f"{begins}-{begins + 1} UTC"
