"""A training loop whose backward copies one number at each call, in a process where nothing was copied before.

Prints why pieces were given up, one line each.
"""

import torch

import multigraph_backend
from multigraph_backend.backend import multigraph

model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(24))).to("cuda", torch.bfloat16)
run = torch.compile(lambda x: model(x).square().mean(), backend=multigraph)
for _ in range(30):
    run(torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)).backward()
(report,) = multigraph_backend.explain().recordings
assert sum(piece.replays for piece in report.pieces) >= 2 * 25, report
for piece in report.pieces:
    if piece.refused:
        print(piece.refused)
