"""Recordings at run time: which one answers a call, when one is made, and what runs.

A call comes in at `piece`, takes its turn among threads (`turns`), and goes through the `tree` to a recording, which
`planning` has placed, `recording` has made and `replay` runs; large inputs that move are read where they lie, where
`patching` proves that right; first calls go to a `warm_up`, and so do steps whose parameters are `settling`.  From
below: `slot` is memory that is handed out, `piece_spec` and `piece_state` what is known of a piece, `nodes` the
recordings as data; beside the tree, `gathered` are parameters that are freed and gathered anew,
`callers` are the threads, `room` is the memory and the number of recordings, `sharing` lets those of smaller sizes give
way to larger ones, `asleep` are those whose memory sleeps, `lending` lets memory of theirs serve others between
replays, and `collectives` are those that hold some.
`native_calls` holds what is compiled of this against what Python says. `out_of_memory` runs code again for which
recordings have given way; `memory` adds up what all of it takes; `cost` tells whether a recording pays; `poison` fills
memory that nobody may read, to find out who does.

Memory is *alive* while a tensor or a storage object over it exists (`Slot.alive`), and *dead* otherwise.  Seven words
say more than that; each has one meaning:

============  ========================================================================  =============================
word          meaning                                                                   decided in
============  ========================================================================  =============================
dead          slots of earlier nodes that were dead when a node was recorded: its       `Tree._record`, once; checked
              recording may write over them, so they must be dead at each replay        by `holds` at each call
surely dead   slots that are dead whenever a node has run: its dead and its consumed    `Node.surely_dead`
              ones.  The nodes after it need not ask for them again
owned         inputs in the pool that only the list of inputs holds, so that they       `planning._dies_here`
              may die inside the piece.  In the capture each has an *owner*, a storage
              whose death frees the block
freed         addresses of blocks whose owners died during the capture                  `MemoryPool.freed`
consumed      slots of owned inputs whose blocks were freed, each with the number of    `recording._consumed`;
              inputs over it: a replay writes over them, so nothing but these inputs    checked by `holds` at each
              may hold them                                                             call
watched       slots of a node over which something was handed out that is no copy: the  `replay.build`
              node stays on the path while one of them is alive
reused        inputs of a piece that are temporaries of the compiled code, which may    `output_code`, as a fact of
              put another value into their memory: an output that lies there is new     the piece
============  ========================================================================  =============================
"""
