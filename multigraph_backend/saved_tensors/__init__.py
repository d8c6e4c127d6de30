"""What autograd saves for backward, packed inside the compiled forward and unpacked inside the compiled backward.

`rules` are what the user wants of which tensor, `packs` the ready ways to do it, `hooks` those that users write (known
by their `content`; `structure` takes apart what they return).

`partitioner` has the way of one graph: Inductor's partition of it, and then all of the following.  `regions` opens what
is compiled once and called often.  `choosing` says by the rules which buffers are packed, `within_budget` by a number
of bytes (`budget` is the choice, pure); `statistics` are kept.  `units` traces each kind of pack once (`tracing`);
`recompute` and `pointwise` make units that the backward computes again (`repeating`: what may be).  `estimate` makes
programs of the graphs and their packs, for `placement`, which puts packs and unpacks where the estimated peak is least
(by `lifetimes` and `costs`, read off by `graphs`).  `surgery` carries the plan out on both graphs.

`offload` is tensors that wait on the host; `kept` holds generated code against their copies.  `output_code` is forward
code as torch keeps it, with the `account` of what became of each saved tensor.
"""
