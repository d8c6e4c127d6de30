"""A saved tensor that waits for its backward on the host.

`operators` are what graphs call to copy a tensor to the host and back, and to wait for a copy; `transfers` is what they
run on a device; `windows` says from when to when such a tensor takes memory of the device.
"""
