"""What a server does before its first request: everything that was declared is compiled and recorded ahead.

`example_calls` makes calls of other sizes from one call of the user's; `rehearsal` makes them, largest first, puts back
what they have changed, and says what became of each.
"""
