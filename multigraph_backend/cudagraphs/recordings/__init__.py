"""Recordings at run time: which one answers a call, when one is made, and what runs.

A call comes in at `piece`, takes its turn among threads (`turns`), and goes through the `tree` to a recording, which
`planning` has placed, `recording` has made and `replay` runs.  `cost` tells whether it pays;
`poison` fills memory that nobody may read, to find out who does.
"""
