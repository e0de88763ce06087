"""Numbers and texts as people read them."""

from __future__ import annotations

from histograph_post.errors import printable as printable


def size(num_bytes: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Return a time as people write it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def about(seconds: float) -> str:
    """Return a time as short as it can be said: without the seconds from a minute on."""
    return duration(seconds).partition(" min")[0] + " min" if seconds >= 60 else f"{seconds:.0f} s"


def rate(per_second: float) -> str:
    """Return how fast something goes: so many a second, or the time each takes."""
    if per_second <= 0:
        return ""
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{duration(1 / per_second)} each"


def metric(value: float | None) -> str:
    """Return a metric with four digits; a missing one as a dash."""
    return "-" if value is None or value != value else f"{value:.4f}"


def is_number(cell: object) -> bool:
    """Return whether a cell of a table reads as a number: with units of %, ± or none at all."""
    text = str(cell).replace(",", "").replace("±", "").replace(" ", "").rstrip("%")
    if text in ("", "-"):
        return text == "-"
    try:
        float(text)
    except ValueError:
        return text.replace(".", "").replace("-", "").replace("+", "").isdigit()
    return True
