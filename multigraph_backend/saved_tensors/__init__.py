"""What autograd saves for backward, packed inside the compiled forward and unpacked inside the compiled backward.

The modules, in the order in which a partition of a joint graph passes them:

    rules, hooks       what the user wants of which tensor, and packs of his own; `content` knows these by what they do
    budget             how much may be saved, and the choice by price
    memory_goal        or how much a step may need in all; `reckoning`: what else it needs, from what the process is
                       `holding` and how fast its device is (`speeds`)
    partitioner        Inductor's partitioner, and then all of the following
    graphs             both graphs as a `Partition`; views, memory, and programs for `lifetimes`: bytes alive at a step
    choosing           each saved tensor as a candidate, and what the rules say of it; `statistics`: what scales others;
                       `masks`: what attention adds
    units              one buffer that is to be packed; traced
    tracing            its pack and unpack as graphs: ready ones of `packs`, or a user's, taken apart by `structure`;
                       by way of the host in `compressed`; `products`: what the backward multiplies as it is saved
    rematerialize      or computed again in the backward
    within_budget      where there is a budget: which units are packed, and how; `costs`: estimated seconds;
                       `within_goal`: the same for a memory goal
    placement          where packs and unpacks go
    surgery            the plan carried out on both graphs; `links`: who waits for which copy to the host, and where
    offload/           tensors that wait for their backward on the host
    kernels            packs of long rows as Inductor compiles them
    account            what became of each saved tensor
    output_code        the compiled forward with its account, as torch caches it

The partitioner needs Inductor, and is imported by a compile that packs; rules, hooks, budget and account do not.
"""
