"""Differential fuzzing: random small programs, random declared conditions, random calls, compared with eager."""
