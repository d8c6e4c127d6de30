"""What is known of compiled code before it runs: which parts of it a CUDA graph can hold, and what a recording of each
has to know.

`cuts` says which operators a CUDA graph cannot hold; `generated_code` reads the code that Inductor generated;
`of_inductor` makes a `graph_spec` of both, plain data that is cached with the code.
"""
