"""Recordings of compiled code: pieces, a tree of recordings that share one pool, and their replay."""
