"""Numbers as people read them: counts, bytes and seconds, each short enough for a column of the page."""

from __future__ import annotations


def number(count: float) -> str:
    """1234567 -> 1,234,567"""
    return f"{count:,}" if isinstance(count, int) else f"{count:,.2f}"


def size(count: float) -> str:
    """Bytes: 1536 -> 1.5 KiB"""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    """0.01234 -> 12 ms; 3.21 -> 3.2 s; 75 -> 75 s"""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 60 else f"{value:,.0f} s"
