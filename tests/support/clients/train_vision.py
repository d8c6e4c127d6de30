"""A classifier's training as scripts of vision libraries have it: "inductor" is written into it, and a mode.

    python tests/support/clients/train_vision.py [--compile]

Channels last, autocast, label smoothing, an averaged model (EMA), a last batch that is smaller, evaluation in between.
The last line is the losses and the accuracies, as JSON.
"""

import argparse
import copy
import json

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--compile", action="store_true")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if device == "cuda":
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


class Residual(torch.nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(outside)
        self.conv2 = torch.nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(outside)
        self.shortcut = torch.nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, 1, 1)
        self.stages = torch.nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 2))
        self.dropout = torch.nn.Dropout(0.0)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.dropout(self.stages(self.stem(x)).mean((2, 3))))


model = Classifier().to(device, memory_format=torch.channels_last)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
images = torch.randn(26, 3, 16, 16)
labels = torch.randint(0, 10, (26,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8)

if args.compile:
    try:
        step_model = torch.compile(model, backend="inductor", mode="reduce-overhead")
        evaluated = torch.compile(average, backend="inductor", mode="max-autotune-no-cudagraphs")
    except Exception:
        step_model, evaluated = model, average
else:
    step_model, evaluated = model, average

losses, right = [], []
for _ in range(2):
    model.train()
    for x, y in loader:
        x = x.to(device, memory_format=torch.channels_last, non_blocking=True)
        y = y.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=False):
            loss = criterion(step_model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        losses.append(loss.item())
    model.eval()
    average.eval()
    with torch.inference_mode():
        logits = torch.cat([evaluated(x.to(device, memory_format=torch.channels_last)) for x, _ in loader])
        right.append(logits.float().cpu().norm().item())
restored = copy.deepcopy(model)
restored.load_state_dict(model.state_dict())
print(json.dumps({"losses": losses, "logits": right, "device": device}))
