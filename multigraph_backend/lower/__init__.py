"""One compile of one captured graph, from end to end: facts in, code and the guards under which it is right out.

`lowering` is the way; `compile_thread` (with `circles`) is the thread that it runs in, `first_compile` the state of
torch that it runs under, with the `cache_keys` that tell its compiles apart, `fresh_inputs` the symbols and fake
inputs that it compiles for, `stand_ins` arguments that no call has had yet, `compilers` the compiler that is called,
`guards` what the compile came to rely on.  `at_once` is the compile of a graph that has none of that.  `only_cached`
ends a compile that torch's caches cannot serve.  `decomposed` puts right what torch decomposes wrongly before any
compiler sees it.  `inductor` is what Inductor is given, with what it gets wrong kept out: `gradients_of_changes` and
`order_of_changes` (over `changes`), operators of which it has other numbers than eager (`as_eager`), sums that are left
out (`sums_with_zero`), results of `nested_regions`, and a slow kernel (`quantized_products`).  `translation_units`
compiles the C++ kernels of a graph together.  `retained` is backward
code that may run again, by what `donation` tells AOTAutograd.

Blocks that come again are compiled once: `steps_of_graph` is a graph of Inductor's as values to compare, `equal_steps`
takes out what is done twice, `order_of_steps` is what lies at a graph's end, `repetition` finds the blocks, and
`one_body` puts calls of one body into the graph in place of them.  `traced_once` does so before AOTAutograd, which then
traces one block, where that is known to be right: `block_operator` stands for its calls there, `body_graphs` are what
it has made of the one, `inlined` puts what that does in the place of calls, `modes_of_trace` is what a captured graph
sets on its way, autocast for one, and `bodies_in_partitions` does either around a partitioner.

The same beside the calls: `workers` are processes, `worker` the program that each of them runs, `parcel` a compile as
bytes for one of them.
"""
