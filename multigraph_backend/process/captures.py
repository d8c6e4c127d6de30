"""Calls of the CUDA driver by a thread while another one may capture.

While any thread captures in global mode, which is what `torch.cuda.graph` does by default, the driver takes some calls
of all threads for a mistake (to ask an event or a stream, to take memory or give it back), refuses them, and the
capture has failed.  A thread may say that it knows what it does.

In: code that makes such calls, on nothing that is being captured.  Out: no capture fails by it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_RELAXED = 2  # the driver's CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Calls of this thread that the driver would take for a mistake while another thread captures in global mode.

    Raises OSError where the driver does not say that it lets them.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "cuThreadExchangeStreamCaptureMode"):
        raise OSError("this libcuda has no cuThreadExchangeStreamCaptureMode")
    exchange = driver.cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    if status := exchange(ctypes.byref(mode)):
        raise OSError(f"cuThreadExchangeStreamCaptureMode returned {status}")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
