"""One Dynamo graph, captured so that it can be compiled again and again later.

`redirected` tells what was asked for where torch calls another backend than the program names.
`from_dynamo` takes a graph from a backend call in progress; `graph` is what it is then, as data; `structure` copies it,
`effects` tells what a call of it does, `assertions` puts back what of the program's assertions Dynamo has taken out,
`known_numbers` writes into it what a compile knows, `signs_of_zero` what it computes of a zero.  `user_code` and
`size_names` give things the names that the user knows; `aliasing` tells which inputs of a call share memory;
`dtensors` asks at a call whether parameters that are DTensors are as they were; `static_sizes` tells why a size is a
constant; `declared` is what was declared, over the symbols of one graph.
"""
