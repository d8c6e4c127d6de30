"""What may be declared of a model: predicates over named integers, and the marks of torch.

`predicates` are what the user writes; `facts` is what is known of one integer, checked at calls and told to the
compiler; `probing` finds the facts behind a callable; `marks` puts both on tensors; `buckets` are sizes to pad to.
"""
