"""What there is once in a process, and every part shares.

Which of several it is (`rank`), the one switch of its garbage collector (`garbage`) and of its threads' turns
(`short_turns`), what a thread that loads code leaves to calls (`giving_way`), the frames of its threads (`frames`),
exceptions that only arrive in it while code runs (`interruptions`), calls of the driver while another thread captures
(`captures`), how it loads `libraries`, and which files of the package it runs (`sources`).  Nothing here imports any
other part.
"""
