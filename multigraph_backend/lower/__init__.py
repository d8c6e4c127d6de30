"""One compile of one captured graph, from end to end: facts in, code and the guards under which it is right out.

`lowering` is the way; `compile_thread` (with `circles`) is the thread that it runs in, `first_compile` the state of
torch that it runs under, `fresh_inputs` the symbols and fake inputs that it compiles for, `guards` what it came to rely
on.  `inductor` is what Inductor is given, with what it gets wrong kept out: `gradients_of_changes` and
`order_of_changes` (over `changes`).  `retained` is backward code that may run again.
"""
