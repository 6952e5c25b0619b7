"""Hours for tests that run at any time of day."""

from datetime import UTC, datetime, timedelta


def hours_away() -> str:
    """A window of an hour that begins in five to six hours."""
    begins = (datetime.now(UTC).hour + 6) % 24
    return f"{begins:02}:00-{begins + 1:02}:00 UTC"


def away_s(hours: str) -> float:
    """Seconds until such a window begins."""
    now = datetime.now(UTC)
    begins = now.replace(hour=int(hours[:2]), minute=0, second=0, microsecond=0)
    return ((begins - now) % timedelta(days=1)).total_seconds()


def hours_now() -> str:
    """A window that began one to two hours ago and goes on for one to two."""
    hour = datetime.now(UTC).hour
    return f"{(hour - 1) % 24:02}:00-{(hour + 2) % 24:02}:00 UTC"
