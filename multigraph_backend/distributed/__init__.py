"""What multigraph has to know of torch.distributed: it runs under it, one process per device.

`groups` are the process groups of this process, and what their collectives can do; `sequence` is the collectives of a
graph, in order, which a variant issues as generic does or is refused; `compiling` is what a compile owes to the other
ranks; `communicating` is what of this process issues collectives; of that `endings` destroys recordings before their
communicators go, and `watchdog` says what a rank is in when the other ranks do not come.
"""
