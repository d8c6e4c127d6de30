"""Calls padded up to declared sizes, where rows behind the real ones are shown to change nothing.

`proof` traces a graph and asks `operators`, for each of its operators, whether real rows depend on others; `probing`
tries out what no rule decides; `calls` is the text that pads inputs, runs and slices outputs; `padded` brings a
region's calls through these, and says what became of them.
"""
