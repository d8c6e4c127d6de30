"""Recordings of compiled code in CUDA graphs: what is recorded, what a recording needs, and which one answers a call.

The way of the data: `partition` (or `splitter`) reads what may be recorded into a `GraphSpec`; `output_code` makes a
`Piece` of each part and puts them where the code was called; a call goes from `piece` through `tree` to a node, whose
recording `recording` has made and `replay` runs; `device` is all that they know of a GPU.
"""
