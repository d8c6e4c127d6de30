"""What multigraph has to know of torch.distributed: it runs under it, one process per device."""
