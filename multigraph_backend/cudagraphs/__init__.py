"""Recordings of compiled code in CUDA graphs: what is recorded, what a recording needs, and which one answers a call.

The way of the data: `numbers` puts the floats of a program, which come on the CPU, on the GPU; `partition` reads what
may be recorded of a graph's code into a `GraphSpec`; `output_code` makes a piece of each part and puts them where the
code was called (`opened` takes apart what they are given, `direct_call` is the short way from the dispatcher to them);
`recordings` run, over one of `devices`, with one tree per device (`runtime`) and the `limits` that the user sets; what
each replay does most often is `native` there, where the machine has a compiler;
`account` is what `explain()` shows of them, `memory_map` where their memory lies, and `snapshot` names them in a
snapshot of memory.
"""
