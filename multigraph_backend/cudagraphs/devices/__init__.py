"""What recordings need of a device (`device`), and who serves it: `cuda`, and `simulated` for machines without a GPU.

`memory_pool` is where recordings live; torch's own allocator serves it there, `extension_pool` where the allocator
extension is the process's allocator.  `bracket` ends a capture, whatever arrives in between; `staging` copies inputs
into their buffers (`copy_kernel`, which `known_kernels` finds compiled), and `patches` proves which kernels can be told
where inputs lie instead; `poison` finds the memory of a pool that nobody may read.
"""
