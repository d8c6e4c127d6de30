"""What a second process starts from, beside torch's own caches of compiled code.

torch's caches hold code, by keys that only a compile can compute.  What they cannot say is which code a model used:
so that lies in a manifest for each graph, and with it a process loads everything at once, and a file for the next
machine holds what belongs together.

    trusted.py    which files are read at all, and how they are written: whole or not
    manifest.py   one graph's manifest as data: what was used, how often, in which order; merged, never trusted
    manifests.py  the folder of manifests, which several processes share
    shipping.py   torch's caches and manifests in one file, and back
    stored_code.py  code of saved functions out of torch's cache, without what `compile_fx` loads and hashes before
    revived.py    Inductor's code as caches keep it, and what one has unpickled, callable again
    cpp_kernels.py  its C++ kernels, loaded as the libraries that they are
    torch_files.py  which torch runs here, by what its installer wrote down of its files
"""
