"""One Dynamo graph and its variants: which code runs a call, and what happens where there is none.

`region` owns the graph; `rules` says what was declared over a call's arguments, and `dispatch` generates the function
that finds a call's variant by that; `variant` is the life of one, and `compile_options` what it is compiled under;
`first_run` checks new code; `gains` times variants against generic while the user asks for it; `registry` knows which
regions are alive; `ahead_of_time` makes a region one that torch saves and loads, by the class in `serializable`, as the
bytes of `saved_region`; `warm_start` notes what calls use, and loads it in a second process; `background` has variants
compiled by worker processes, and `tiers` tries code that took longer to compile in place of code that was there soon.
"""
