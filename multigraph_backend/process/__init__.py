"""What there is once in a process, and every part shares.

Its rank, the switch of its garbage collector, the frames of its threads, and what interrupts it.  Nothing here imports
any other part.
"""
