# ruff: noqa: B023, B905, E501, E741, PT017, PT018, SIM115
"""60 programs by a user of transformers, diffusers, torchao and others who has read only multigraph's docs.

python tests/support/clients/client_programs.py [--jobs N] [--stock] [names or prefixes...]   CLIENT_BACKEND=multigraph|stock|eager
Every program runs in a process of its own, within 100 s.
"""

import argparse
import copy
import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
MODE = os.environ.get("CLIENT_BACKEND", "multigraph")
MG = MODE == "multigraph"
CHILD = "--child" in sys.argv
if CHILD:
    warnings.filterwarnings("ignore")
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(1)
    if MG:
        import multigraph_backend

AE = "aot_eager"
IND = "inductor"


def mg(compiler=AE, **options):
    """keyword arguments of torch.compile: multigraph over `compiler`, or (CLIENT_BACKEND=stock) that compiler itself"""
    if MG:
        if compiler != IND:
            options["compiler"] = compiler
        return {"backend": "multigraph", "options": options} if options else {"backend": "multigraph"}
    return {"backend": "eager" if MODE == "eager" else compiler}


def stat(name):
    return multigraph_backend.stats()[name] if MG else None


def conditions():
    """{condition: calls} over all regions"""
    found = {}
    for region in multigraph_backend.explain().to_dict()["regions"]:
        for v in (*region["variants"], region["generic"]):
            found[v.get("condition", "generic")] = found.get(v.get("condition", "generic"), 0) + v["calls"]
    return found


def plain(x):
    if torch.is_tensor(x):
        return x.detach()
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items() if v is not None}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    if type(x).__name__ in ("DynamicCache", "StaticCache", "EncoderDecoderCache"):
        return type(x).__name__
    return x


def same(a, b, rtol=1e-4, atol=1e-5, what=""):
    a, b = plain(a), plain(b)

    def go(p, q, path):
        assert type(p) is type(q) or (isinstance(p, (int, float)) and isinstance(q, (int, float))), (
            f"{path}: {type(p)} against {type(q)}"
        )
        if torch.is_tensor(p):
            torch.testing.assert_close(p, q, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}{path}: {m}")
        elif isinstance(p, dict):
            assert list(p) == list(q), f"{path}: keys {list(p)} against {list(q)}"
            for k in p:
                go(p[k], q[k], f"{path}.{k}")
        elif isinstance(p, list):
            assert len(p) == len(q), f"{path}: {len(p)} against {len(q)}"
            for i, (u, v) in enumerate(zip(p, q)):
                go(u, v, f"{path}[{i}]")
        else:
            assert p == q or p != p, f"{path}: {p} against {q}"

    go(a, b, "")


def grads(m):
    return {n: (p.grad if p.grad is not None else "none") for n, p in m.named_parameters()}


def state(m):
    return dict([*m.named_parameters(), *m.named_buffers()])


def same_step(run, model, ref, *args, loss=None, **kwargs):
    """one forward and backward of both; outputs and gradients are compared"""
    loss = loss or (
        lambda o: (
            (o.loss if getattr(o, "loss", None) is not None else (o[0] if not torch.is_tensor(o) else o))
            .float()
            .square()
            .mean()
        )
    )
    outs = []
    for f, m in ((run, model), (ref, ref)):
        m.zero_grad()
        o = f(*args, **kwargs)
        loss(o).backward()
        outs.append(o)
    same(outs[0], outs[1], what="output ")
    same(grads(model), grads(ref), what="grad ")


def pair(m):
    return m, copy.deepcopy(m)


def llama(**kw):
    from transformers import LlamaConfig, LlamaForCausalLM

    base = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**base, **kw})).eval()


def gpt2(**kw):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            **{
                "vocab_size": 64,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 128,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                **kw,
            }
        )
    ).eval()


def bert(cls="BertForSequenceClassification", **kw):
    import transformers

    return getattr(transformers, cls)(
        transformers.BertConfig(
            **{
                "vocab_size": 64,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "max_position_embeddings": 64,
                "num_labels": 3,
                **kw,
            }
        )
    ).eval()


def ids(*shape, low=3, high=64):
    return torch.randint(low, high, shape)


# ------------------------------------------------------------------------------------------------ ordinary


def ordinary_01_llama_variants():
    """use-with/declare-variants: names of arguments of a transformers model; variants for sizes run and give eager's numbers"""
    m, ref = pair(llama())
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[0]": 4}, {"input_ids[1]": {"multiple_of": 8}}]))
    with torch.no_grad():
        for b, t in ((3, 7), (4, 9), (2, 16), (5, 24), (4, 16)):
            x = ids(b, t)
            same(run(input_ids=x, use_cache=False), ref(input_ids=x, use_cache=False))
    if MG:
        c = conditions()
        assert c["input_ids[0] == 4"] == 2 and c["input_ids[1] % 8 == 0"] == 2, c


def ordinary_02_bert_train_inductor():
    """train: forward and backward of a variant; the optimizer's steps reach all variants (Inductor)"""
    m, ref = pair(bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train())
    run = torch.compile(m, dynamic=True, **mg(IND, specialize=[{"input_ids[0]": 4}]))
    opts = [torch.optim.AdamW(x.parameters(), 1e-3) for x in (m, ref)]
    for b in (4, 4, 3, 4):
        x, y = ids(b, 10), torch.randint(0, 3, (b,))
        mask = torch.ones(b, 10, dtype=torch.long)
        mask[:, 8:] = 0
        same_step(run, m, ref, input_ids=x, attention_mask=mask, labels=y)
        for o in opts:
            o.step()
        same(state(m), state(ref), rtol=2e-3, atol=2e-4)


def ordinary_03_generate_static():
    """use-with (transformers): generate with a static cache and CompileConfig gives eager's tokens"""
    from transformers import CompileConfig

    m, ref = pair(llama())
    cfg = CompileConfig(fullgraph=False, mode=None, **mg())
    cfg._compile_all_devices = True
    for b, t in ((1, 5), (1, 6), (2, 5)):
        x = ids(b, t)
        kw = {
            "attention_mask": torch.ones_like(x),
            "max_new_tokens": 6,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "cache_implementation": "static",
        }
        same(m.generate(x, compile_config=cfg, **kw), ref.generate(x, disable_compile=True, **kw))
    if MG:
        assert stat("generic_calls") + stat("variant_calls") > 0, "nothing was compiled"


def ordinary_04_trainer_model_compile():
    """use-with (transformers): model.compile(backend=...) before the Trainer is made; parameters are those of eager training"""
    import tempfile

    from transformers import Trainer, TrainingArguments

    m, ref = pair(bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train())
    data = [
        {"input_ids": ids(8), "attention_mask": torch.ones(8, dtype=torch.long), "labels": torch.tensor(i % 3)}
        for i in range(11)
    ]
    m.compile(dynamic=True, **mg())
    for x in (m, ref):
        with tempfile.TemporaryDirectory() as d:
            Trainer(
                x,
                TrainingArguments(
                    d,
                    per_device_train_batch_size=4,
                    num_train_epochs=1,
                    use_cpu=True,
                    report_to=[],
                    disable_tqdm=True,
                    save_strategy="no",
                    seed=1,
                    logging_strategy="no",
                    max_grad_norm=0.5,
                ),
                train_dataset=data,
            ).train()
    same(state(m), state(ref), rtol=1e-3, atol=1e-4)


def ordinary_05_trainer_redirected():
    """use-with: torch_compile=True of the Trainer, program redirected by `python -m multigraph_backend run` compiles with multigraph"""
    code = """
import torch, tempfile, copy, sys
from transformers import Trainer, TrainingArguments, BertConfig, BertForSequenceClassification
import multigraph_backend
torch.set_num_threads(1); torch.manual_seed(0)
m = BertForSequenceClassification(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3, hidden_dropout_prob=0., attention_probs_dropout_prob=0.))
ref = copy.deepcopy(m)
data = [{"input_ids": torch.randint(0, 64, (8,)), "labels": torch.tensor(i % 3)} for i in range(8)]
for x, c in ((m, True), (ref, False)):
    with tempfile.TemporaryDirectory() as d:
        Trainer(x, TrainingArguments(d, per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", seed=1, torch_compile=c), train_dataset=data).train()
torch.testing.assert_close(dict(m.named_parameters()), dict(ref.named_parameters()), rtol=1e-3, atol=1e-4)
s = multigraph_backend.stats()
assert s["generic_calls"] >= 2 and s["failures"] == 0, s
print("FINE", sys.argv[1:])
"""
    if not MG:
        return
    out = script(code, ["--steps", "3"], options='{"*": {"compiler": "aot_eager"}}')
    assert "FINE ['--steps', '3']" in out, out[-3000:]


def script(code, args=(), options=None, env=(), module="run", rc=0):
    import tempfile

    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "prog.py")
        open(path, "w").write(code)
        e = dict(os.environ, **dict(env))
        if options:
            e["MULTIGRAPH_OPTIONS"] = options
        cmd = (
            [sys.executable, "-m", "multigraph_backend", module, path, *args]
            if module
            else [sys.executable, path, *args]
        )
        r = subprocess.run(cmd, env=e, capture_output=True, text=True, timeout=90)
        assert r.returncode == rc, f"exit {r.returncode}: {r.stdout[-1500:]} {r.stderr[-2500:]}"
        return r.stdout + r.stderr


def ordinary_06_accelerate_plugin():
    """use-with (accelerate): accelerate_plugin(options, dynamic) compiles what prepare returns; accumulation works as in eager"""
    from accelerate import Accelerator

    if not MG:
        return
    from multigraph_backend.integrations import accelerate_plugin

    m, ref = pair(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)))
    acc = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dynamo_plugin=accelerate_plugin(options={"compiler": AE, "specialize": [{"input[0]": 4}]}, dynamic=True),
    )
    opt, ropt = torch.optim.SGD(m.parameters(), 0.1), torch.optim.SGD(ref.parameters(), 0.1)
    pm, popt = acc.prepare(m, opt)
    batches = [torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6), torch.randn(3, 6)]
    for i, x in enumerate(batches):
        with acc.accumulate(pm):
            acc.backward(pm(x).square().mean())
            popt.step()
            popt.zero_grad()
        (ref(x).square().mean() / 2).backward()
        if i % 2:
            ropt.step()
            ropt.zero_grad()
    same(state(acc.unwrap_model(pm, keep_torch_compile=False)), state(ref))
    assert conditions().get("input[0] == 4", 0) >= 2, conditions()


def ordinary_07_lightning_trainer():
    """use-with (Lightning): torch.compile(LightningModule), Trainer.fit as it is; names are those of training_step's arguments"""
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from torch.utils.data import DataLoader, TensorDataset

    class Reg(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch, index):
            return F.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.log("val", F.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    m, ref = pair(Reg())
    data = DataLoader(TensorDataset(torch.randn(19, 4), torch.randn(19, 1)), batch_size=8)
    for x in (torch.compile(m, dynamic=True, **mg(specialize=[{"batch[0][0]": 8}])), ref):
        lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(x, data, data)
    same(state(m), state(ref))
    if MG:
        assert sum(v for k, v in conditions().items() if "== 8" in k) > 0, multigraph_backend.explain()


def ordinary_08_fabric():
    """use-with (Fabric): fabric.setup of a compiled module trains as eager does"""
    import lightning

    m, ref = pair(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)))
    fabric = lightning.Fabric(accelerator="cpu")
    net, opt = fabric.setup(torch.compile(m, **mg()), torch.optim.SGD(m.parameters(), 0.1))
    ropt = torch.optim.SGD(ref.parameters(), 0.1)
    for b in (5, 5, 3):
        x = torch.randn(b, 4)
        opt.zero_grad()
        ropt.zero_grad()
        l1, l2 = net(x).square().mean(), ref(x).square().mean()
        same(l1, l2)
        fabric.backward(l1)
        l2.backward()
        opt.step()
        ropt.step()
    same(state(m), state(ref))


def ordinary_09_timm_vit_inductor():
    """use-with (timm): a ViT with x[0] declared; a declared size 1 is served by torch's own graph for it (Inductor)"""
    import timm

    m, ref = pair(
        timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=1, num_heads=2, num_classes=7).eval()
    )
    run = torch.compile(m, dynamic=True, **mg(IND, specialize=[{"x[0]": [1, 4]}]))
    with torch.no_grad():
        for b in (3, 4, 1, 5, 1):
            x = torch.randn(b, 3, 32, 32)
            same(run(x), ref(x))
    if MG:
        c = conditions()
        assert c["x[0] == 4"] == 1, c


def ordinary_10_resnet_train_batchnorm():
    """train: updates of buffers (BatchNorm's running statistics) over several steps are eager's"""
    import torchvision

    m, ref = pair(torchvision.models.resnet18(num_classes=5).train())
    run = torch.compile(m, dynamic=True, **mg())
    for b in (3, 4, 3):
        x = torch.randn(b, 3, 32, 32)
        same_step(run, m, ref, x)
        same(state(m), state(ref))
    m.eval()
    ref.eval()
    with torch.no_grad():
        x = torch.randn(2, 3, 32, 32)
        same(run(x), ref(x), rtol=1e-3)


def ordinary_11_diffusers_regional():
    """use-with (diffusers): compile_repeated_blocks takes the backend's name; outputs are eager's for several batch sizes"""
    from diffusers import DiTTransformer2DModel

    m, ref = pair(
        DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
        ).eval()
    )
    m._repeated_blocks = ["BasicTransformerBlock"]
    m.compile_repeated_blocks(dynamic=True, **mg())
    with torch.no_grad():
        for b in (2, 3, 4):
            x, t, y = torch.randn(b, 4, 8, 8), torch.randint(0, 100, (b,)), torch.randint(0, 10, (b,))
            same(m(x, timestep=t, class_labels=y).sample, ref(x, timestep=t, class_labels=y).sample)


def unet(**kw):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        **{
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 1,
            "block_out_channels": (8, 16),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 12,
            "attention_head_dim": 4,
            "norm_num_groups": 4,
            **kw,
        }
    ).eval()


def ordinary_12_unet_scheduler_loop():
    """use-with (diffusers): a scheduler's loop with a compiled UNet ends at eager's sample"""
    from diffusers import DDIMScheduler

    m, ref = pair(unet())
    m.compile(dynamic=True, **mg())
    ctx, noise = torch.randn(2, 5, 12), torch.randn(2, 4, 8, 8)
    found = []
    with torch.no_grad():
        for x in (m, ref):
            s = DDIMScheduler()
            s.set_timesteps(5)
            lat = noise.clone()
            for t in s.timesteps:
                lat = s.step(x(lat, t, encoder_hidden_states=ctx).sample, t, lat).prev_sample
            found.append(lat)
    same(*found, rtol=1e-3, atol=1e-4)


def ordinary_13_peft_lora_train():
    """use-with (peft): a compiled peft model trains its adapters as eager does; frozen parameters get no gradient"""
    import peft

    cfg = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    m = peft.get_peft_model(llama(), cfg)
    for n, p in m.named_parameters():
        if "lora_B" in n:
            nn.init.normal_(p)
    m, ref = pair(m)
    run = torch.compile(m, dynamic=True, **mg())
    for b, t in ((2, 6), (3, 9)):
        x = ids(b, t)
        same_step(run, m, ref, input_ids=x, labels=x)


def ordinary_14_torchao_int8():
    """use-with (torchao): Int8WeightOnly weights keep variants; numbers are those of the quantized model run eagerly"""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch._dynamo.config.specialize_float = True
    m = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval()
    quantize_(m, Int8WeightOnlyConfig())
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input[0]": 1}, {"input[0]": 4}]))
    with torch.no_grad():
        for b in (3, 4, 1, 7, 4):
            x = torch.randn(b, 32)
            same(run(x), m(x))
    if MG:
        assert conditions()["input[0] == 4"] == 2, multigraph_backend.explain()


def ordinary_15_sentence_transformers():
    """use-with (sentence-transformers): encoder.compile; embeddings are eager's"""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense

    m = SentenceTransformer(modules=[Dense(8, 12), Dense(12, 4)], device="cpu").eval()
    ref = copy.deepcopy(m)
    m.compile(dynamic=True, **mg())
    with torch.no_grad():
        for b in (3, 1, 5):
            x = torch.randn(b, 8)
            same(
                m({"sentence_embedding": x})["sentence_embedding"], ref({"sentence_embedding": x})["sentence_embedding"]
            )


def ordinary_16_torchmetrics_forward():
    """README (in-place changes work as in torch): a metric updated in a step with a compiled model holds eager's value"""
    import torchmetrics

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(6, 4)
            self.acc = torchmetrics.MeanMetric()

        def forward(self, x):
            y = self.l(x)
            self.acc.update(y.detach().square().mean(-1))
            return y

    m, ref = pair(Net())
    run = torch.compile(m, dynamic=True, **mg())
    for b in (5, 3, 4):
        x = torch.randn(b, 6)
        same(run(x), ref(x))
    same(m.acc.compute(), ref.acc.compute())


def ordinary_17_compiled_optimizer():
    """train (compiled optimizers): Adam's compiled step moves what all variants read (Inductor)"""
    m, ref = pair(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)))
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input[0]": 8}]))
    opt, ropt = torch.optim.AdamW(m.parameters(), 1e-2), torch.optim.AdamW(ref.parameters(), 1e-2)
    step = torch.compile(opt.step, **mg(IND))
    for b in (8, 5, 8, 8):
        same_step(run, m, ref, torch.randn(b, 6))
        step()
        ropt.step()
        same(state(m), state(ref))


def ordinary_18_autocast_and_no_grad():
    """train (autocast): each state of autocast and grad mode has a graph; numbers are eager's in each"""
    m, ref = pair(llama())
    run = torch.compile(m, dynamic=True, **mg())
    for auto, grad in ((True, True), (False, True), (True, False), (False, False), (True, True)):
        x = ids(2, 7)
        with torch.autocast("cpu", torch.bfloat16, enabled=auto), torch.set_grad_enabled(grad):
            a, b = run(input_ids=x, labels=x, use_cache=False), ref(input_ids=x, labels=x, use_cache=False)
        same(a, b, rtol=2e-2, atol=2e-2)
        if grad:
            m.zero_grad()
            ref.zero_grad()
            a.loss.backward()
            b.loss.backward()
            same(grads(m), grads(ref), rtol=5e-2, atol=5e-3)


def ordinary_19_warmup_seal_transformers():
    """serve: warmup with a dict of keyword arguments, ready; after seal('raise') declared sizes compile nothing"""
    m, ref = pair(llama())
    run = torch.compile(
        m, dynamic=True, **mg(specialize=[{"input_ids[0]": [2, 4]}, {"input_ids[1]": {"multiple_of": 8}}])
    )
    with torch.no_grad():
        if MG:
            x = ids(3, 7)
            account = multigraph_backend.warmup(
                run, {"input_ids": x, "attention_mask": torch.ones_like(x), "use_cache": False}
            )
            assert account.ready, account
            multigraph_backend.seal("raise")
        for b, t in ((2, 9), (4, 5), (3, 16), (5, 7)):
            x = ids(b, t)
            mask = torch.ones_like(x)
            same(
                run(input_ids=x, attention_mask=mask, use_cache=False),
                ref(input_ids=x, attention_mask=mask, use_cache=False),
            )
        if MG:
            multigraph_backend.unseal()
            assert stat("after_seal") == 0, stat("after_seal")


def ordinary_20_options_per_model_env():
    """serve: MULTIGRAPH_OPTIONS by class name reaches a transformers model, and only it"""
    if not MG:
        return
    code = """
import torch, multigraph_backend
from transformers import LlamaConfig, LlamaForCausalLM
m = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)).eval()
n = torch.nn.Linear(32, 8)
rm, rn = torch.compile(m, backend="multigraph", dynamic=True), torch.compile(n, backend="multigraph", dynamic=True)
with torch.no_grad():
    for b in (4, 3, 4):
        x = torch.randint(0, 64, (b, 6))
        torch.testing.assert_close(rm(input_ids=x, use_cache=False).logits, m(input_ids=x, use_cache=False).logits)
        y = torch.randn(b, 32); torch.testing.assert_close(rn(y), n(y))
print(multigraph_backend.explain())
"""
    out = script(
        code,
        module=None,
        options='{"*": {"compiler": "aot_eager"}, "*ForCausalLM": {"specialize": [{"input_ids[0]": 4}]}, "LlamaForCausalM": {"compile": "eager"}}',
    )
    assert "input_ids[0] == 4  ready            2 calls" in out, out
    assert "did you mean 'LlamaForCausalLM'" in out, out


def ordinary_21_t5_seq2seq_train():
    """README (training): an encoder-decoder with labels of -100 trains as in eager"""
    from transformers import T5Config, T5ForConditionalGeneration

    m, ref = pair(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=64,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=1,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ).train()
    )
    run = torch.compile(m, dynamic=True, **mg())
    for b, s, t in ((2, 7, 5), (3, 9, 4)):
        y = ids(b, t)
        y[:, -2:] = -100
        same_step(run, m, ref, input_ids=ids(b, s), labels=y)


def ordinary_22_padded_embedding_encoder():
    """pad: batches of a transformers encoder are padded up to declared sizes, and outputs cut back"""
    m, ref = pair(bert("BertModel"))
    run = torch.compile(m, dynamic=True, **mg(pad={"input_ids[0]": [4, 8]}, specialize=[{"input_ids[0]": [4, 8]}]))
    with torch.no_grad():
        for b in (3, 5, 8, 7, 9):
            x = ids(b, 6)
            k = {"input_ids": x, "attention_mask": torch.ones_like(x)}
            same(run(**k), ref(**k))
    if MG:
        print(str(multigraph_backend.explain())[:1500])


def ordinary_23_memory_goal_gpt2_inductor():
    """pack-saved-tensors: a goal that fits leaves bitwise the gradients of no option; saved_tensors outputs do not change (Inductor)"""
    m, ref = pair(gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train())
    run = torch.compile(m, **mg(IND, memory_goal="1 GiB"))
    for _ in range(2):
        x = ids(2, 16)
        same_step(run, m, ref, input_ids=x, labels=x)


def ordinary_24_llama_packed_int8_inductor():
    """pack-saved-tensors: rules on a transformers model; outputs are the same, gradients within the pack's bounds (Inductor)"""
    m, ref = pair(llama().train())
    opts = {}
    if MG:
        from multigraph_backend import Match, Rule, Scaled

        opts = {"saved_tensors": [Rule(Match(dtype="float32", min_bytes=0), Scaled("int8", per="row"))]}
    run = torch.compile(m, **mg(IND, **opts))
    x = ids(4, 32)
    a, b = run(input_ids=x, labels=x, use_cache=False), ref(input_ids=x, labels=x, use_cache=False)
    same(a, b)
    a.loss.backward()
    b.loss.backward()
    for (n, p), q in zip(m.named_parameters(), ref.parameters()):
        e = (p.grad - q.grad).norm() / q.grad.norm()
        assert e < 0.05, (n, e)
    if MG:
        assert any(
            t.packed for r in multigraph_backend.explain().regions for s in r.generic.saved for t in s.tensors
        ), "nothing packed"


def ordinary_25_vae_encode_decode():
    """use-with (diffusers): a VAE's compiled decoder over image sizes"""
    from diffusers import AutoencoderKL

    m, ref = pair(
        AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            latent_channels=4,
            sample_size=16,
        ).eval()
    )
    m.decoder.compile(dynamic=True, **mg())
    m.encoder.compile(dynamic=True, **mg())
    with torch.no_grad():
        for b, s in ((2, 16), (3, 24), (2, 16)):
            x = torch.randn(b, 3, s, s)
            z = m.encode(x).latent_dist.mode()
            same(z, ref.encode(x).latent_dist.mode(), rtol=1e-3, atol=1e-4)
            same(m.decode(z).sample, ref.decode(z).sample, rtol=1e-3, atol=1e-4)


def ordinary_26_detector_backbone():
    """use-with (torchvision): detector.backbone.compile; losses and detections are eager's"""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn as make

    m = make(
        weights=None,
        weights_backbone=None,
        num_classes=4,
        min_size=64,
        max_size=96,
        rpn_pre_nms_top_n_test=20,
        rpn_post_nms_top_n_test=10,
    ).eval()
    ref = copy.deepcopy(m)
    m.backbone.compile(dynamic=True, **mg())
    with torch.no_grad():
        for n in (1, 2):
            x = [torch.rand(3, 64, 64 + 16 * i) for i in range(n)]
            same(m(x), ref(x), rtol=1e-3, atol=1e-3)


def ordinary_27_whisper_encoder():
    """README: an audio model (convolutions, positions) gives eager's numbers (Inductor)"""
    from transformers import WhisperConfig, WhisperModel

    m, ref = pair(
        WhisperModel(
            WhisperConfig(
                vocab_size=64,
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
                num_mel_bins=8,
                max_source_positions=20,
                max_target_positions=20,
                decoder_start_token_id=1,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                suppress_tokens=None,
                begin_suppress_tokens=None,
            )
        ).eval()
    )
    run = torch.compile(m, dynamic=True, **mg(IND))
    with torch.no_grad():
        for b, t in ((2, 4), (3, 5)):
            k = {"input_features": torch.randn(b, 8, 40), "decoder_input_ids": ids(b, t), "use_cache": False}
            same(run(**k), ref(**k), rtol=1e-3, atol=1e-4)


def ordinary_28_vit_clip_dual():
    """README: CLIP with text and image sizes differing; ModelOutput of several fields"""
    from transformers import CLIPConfig, CLIPModel

    t = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    v = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    m, ref = pair(CLIPModel(CLIPConfig(text_config=t, vision_config=v, projection_dim=12)).eval())
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[0]": 4}]))
    with torch.no_grad():
        for a, b in ((3, 2), (4, 5), (2, 3)):
            x = ids(a, 6)
            x[:, -1] = 2
            k = {
                "input_ids": x,
                "attention_mask": torch.ones_like(x),
                "pixel_values": torch.randn(b, 3, 16, 16),
                "return_loss": False,
            }
            same(run(**k).logits_per_image, ref(**k).logits_per_image)
            same(run(**k).text_embeds, ref(**k).text_embeds)


def ordinary_29_convnext_channels_last_inductor():
    """README: timm convnext in channels_last, several image sizes, training (Inductor)"""
    import timm

    m, ref = pair(
        timm.create_model("convnext_atto", num_classes=5, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
        .to(memory_format=torch.channels_last)
        .train()
    )
    run = torch.compile(m, dynamic=True, **mg())
    for b, s in ((2, 32), (3, 64)):
        same_step(run, m, ref, torch.randn(b, 3, s, s).to(memory_format=torch.channels_last))
    m.eval()
    ref.eval()
    run = torch.compile(m.stem, **mg(IND))
    blk = torch.compile(m.stages[0], **mg(IND))
    with torch.no_grad():
        x = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
        y = run(x)
        same(y, ref.stem(x))
        z = blk(y)
        same(z, ref.stages[0](y), rtol=1e-3)
        assert z.stride() == ref.stages[0](y).stride()


def ordinary_30_generate_compiled_forward():
    """use-with: model.forward compiled, generate with a DynamicCache gives eager's tokens (greedy and beams)"""
    m, ref = pair(gpt2())
    m.forward = torch.compile(m.forward, dynamic=True, **mg())
    for b, t in ((2, 5), (1, 4)):
        x = ids(b, t)
        for kw in ({"do_sample": False}, {"num_beams": 2, "num_return_sequences": 2}):
            kw = dict(attention_mask=torch.ones_like(x), max_new_tokens=5, pad_token_id=0, **kw)
            same(m.generate(x, **kw), ref.generate(x, **kw))


# ------------------------------------------------------------------------------------------------ hostile


def hostile_01_floats_special_values():
    """sharp-edges (Python floats): 0.0, -0.0, infinities, NaN as first and later values are forms of their own, never a wrong number"""

    def f(x, s):
        return x * s + s / 2, F.leaky_relu(x, s), (x + s) * x.shape[0]

    wrong = []
    for compiler, first in [(AE, v) for v in (0.0, 1.0, float("inf"), float("nan"), -0.0, 0.5)] + [
        (IND, v) for v in (0.5, float("nan"))
    ]:
        torch._dynamo.reset()
        run = torch.compile(f, dynamic=True, **mg(compiler, specialize=[{"x[0]": 4}]))
        for s in (first, 0.0, -0.0, 1.0, 2.5, float("inf"), float("-inf"), float("nan"), first):
            x = torch.randn(random.choice([3, 4]), 5)
            x[0, 0] = 0.0
            x[0, 1] = -0.0
            a, b = run(x, s), f(x, s)
            same(a, b, what=f"{compiler} first {first} s {s} ")
            wrong += [
                (compiler, first, s, i)
                for i, (p, q) in enumerate(zip(a, b))
                if not q.isnan().any() and not torch.equal(torch.signbit(p), torch.signbit(q))
            ]
    assert not wrong, f"sign of zero: (compiler, first value, value, output) {wrong}"


def hostile_02_sizes_zero_one_two():
    """sharp-edges (sizes 0 and 1): batch and sequence of 0, 1, 2 in any order on a Bert body; numbers are eager's"""
    m, ref = pair(bert("BertModel", attn_implementation="eager"))
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[0]": [1, 2]}, {"input_ids[1]": 1}]))
    with torch.no_grad():
        for b, t in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 5), (1, 7)):
            x = ids(b, t)
            k = {"input_ids": x, "attention_mask": torch.ones_like(x)}
            same(run(**k), ref(**k), what=f"{b},{t} ")

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.n, self.l = nn.Embedding(64, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, input_ids):
            return torch.softmax(self.l(self.n(self.e(input_ids))), 1) * input_ids.shape[0] + input_ids.shape[1]

    m, ref = pair(Tiny())
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[0]": [0, 1, 2]}, {"input_ids[1]": [0, 1]}]))
    for b, t in ((0, 3), (2, 0), (3, 4), (0, 5), (1, 0), (0, 0), (0, 1), (2, 3), (1, 1), (4, 0)):
        same_step(run, m, ref, ids(b, t), loss=lambda o: o.square().sum())


def hostile_03_duck_sizes_equal_widths():
    """sharp-edges (two sizes equal): the first call's batch = sequence = width = heads; later sizes are right, forward and backward (Inductor)"""
    m, ref = pair(
        llama(
            num_hidden_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            intermediate_size=16,
            vocab_size=16,
            bos_token_id=1,
        )
    )
    run = torch.compile(m, dynamic=True, **mg(IND, specialize=[{"input_ids[0]": 16}, {"input_ids[1]": 16}]))
    for b, t in ((16, 16), (16, 5), (4, 4)):
        x = ids(b, t, high=16)
        same_step(run, m, ref, input_ids=x, labels=x, use_cache=False)


def hostile_04_kwargs_orders_and_missing():
    """declare-variants (names): None, missing, positional and reordered keyword arguments; output_hidden_states, return_dict switched later"""
    m, ref = pair(bert("BertModel"))
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[0]": 4}]))
    with torch.no_grad():
        for b in (4, 3, 4):
            x = ids(b, 6)
            mask = torch.ones_like(x)
            mask[0, 3:] = 0
            tt = torch.randint(0, 2, (b, 6))
            for args, k in (
                ((x,), {}),
                ((x, mask), {}),
                ((), {"attention_mask": mask, "input_ids": x}),
                ((), {"input_ids": x, "token_type_ids": tt, "attention_mask": None}),
                ((), {"input_ids": x, "output_hidden_states": True}),
                ((), {"input_ids": x, "return_dict": False}),
                ((), {"position_ids": torch.arange(6)[None], "input_ids": x}),
                ((), {"inputs_embeds": ref.embeddings.word_embeddings(x)}),
            ):
                a, c = run(*args, **k), ref(*args, **k)
                assert type(a) is type(c)
                same(a, c, what=str(list(k)))
    if MG:
        assert conditions().get("input_ids[0] == 4", 0) >= 8, conditions()


def hostile_05_masks_of_all_kinds():
    """never a wrong number: attention masks None, all ones, all zero rows, bool, 4d bool and float, left padded with position_ids (those and zero rows by Inductor, too)"""
    m, ref = pair(llama(num_hidden_layers=1))
    all_kinds, hard = torch.compile(m, dynamic=True, **mg()), torch.compile(copy.deepcopy(m), dynamic=True, **mg(IND))
    with torch.no_grad():
        for b, t, run in ((3, 6, all_kinds), (2, 9, all_kinds), (3, 6, hard), (2, 9, hard)):
            x = ids(b, t)
            left = torch.ones_like(x)
            left[0, :3] = 0
            zero = torch.ones_like(x)
            zero[0] = 0
            causal = torch.ones(b, 1, t, t, dtype=torch.bool).tril()
            add = torch.zeros(b, 1, t, t).masked_fill(~causal, torch.finfo(torch.float32).min)
            for mask in (
                (None, torch.ones_like(x), left, left.bool(), zero, causal, add) if run is all_kinds else (left, zero)
            ):
                k = {"input_ids": x, "attention_mask": mask, "use_cache": False}
                if mask is left:
                    k["position_ids"] = (left.cumsum(-1) - 1).clamp(min=0)
                a, c = run(**k).logits, ref(**k).logits
                valid = mask.bool() if mask is not None and mask.dim() == 2 else torch.ones_like(x).bool()
                same(a[valid], c[valid], rtol=1e-3, atol=1e-4)


def hostile_06_dynamic_cache_growing():
    """never a wrong number: prefill, then decode over a growing DynamicCache, specialize input_ids[1] == 1; keys and values are eager's"""
    from transformers import DynamicCache

    m, ref = pair(llama())
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[1]": 1}, {"input_ids[0]": 2}]))
    with torch.no_grad():
        for b in (2, 3, 1):
            caches = [DynamicCache(config=m.config), DynamicCache(config=m.config)]
            x = ids(b, 5)
            for step in range(5):
                o = [f(input_ids=x, past_key_values=c, use_cache=True).logits for f, c in zip((run, ref), caches)]
                same(*o, what=f"b {b} step {step}")
                x = o[1][:, -1:].argmax(-1)
            for l, r in zip(caches[0].layers, caches[1].layers):
                same([l.keys, l.values], [r.keys, r.values])


def hostile_07_static_cache_reset_reuse():
    """never a wrong number: StaticCache written in place by the graph, reset and reused, shared between two compiled models' calls"""
    from transformers import StaticCache

    m, ref = pair(llama())
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[1]": 1}]))
    caches = [StaticCache(config=m.config, max_cache_len=16), StaticCache(config=m.config, max_cache_len=16)]
    with torch.no_grad():
        for b, t in ((2, 5), (2, 7), (2, 1)):
            for c in caches:
                c.reset()
            x, pos = ids(b, t), torch.arange(t)
            for step in range(4):
                o = [
                    f(input_ids=x, past_key_values=c, position_ids=pos[None]).logits for f, c in zip((run, ref), caches)
                ]
                same(*o, what=f"step {step}")
                x = o[1][:, -1:].argmax(-1)
                pos = pos[-1:] + 1
            for l, r in zip(caches[0].layers, caches[1].layers):
                same([l.keys, l.values], [r.keys, r.values])


def hostile_08_sliding_window_generate():
    """use-with: a sliding window model (Mistral) generates past its window, static and dynamic cache, eager's tokens"""
    from transformers import CompileConfig, MistralConfig, MistralForCausalLM

    m, ref = pair(
        MistralForCausalLM(
            MistralConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=32,
                sliding_window=6,
                max_position_embeddings=64,
            )
        ).eval()
    )
    cfg = CompileConfig(fullgraph=False, mode=None, **mg())
    cfg._compile_all_devices = True
    for b, t in ((2, 4), (2, 9)):
        x = ids(b, t)
        kw = {
            "attention_mask": torch.ones_like(x),
            "max_new_tokens": 8,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        same(
            m.generate(x, cache_implementation="static", compile_config=cfg, **kw),
            ref.generate(x, cache_implementation="static", disable_compile=True, **kw),
        )
    m.forward = torch.compile(m.forward, dynamic=True, **mg())
    same(m.generate(x, **kw), ref.generate(x, **kw))


def hostile_09_generate_sampling_beams_assisted():
    """use-with: sampling with a seed, beams x return sequences, prompt lookup and assisted decoding over a compiled forward; left padding"""
    m, ref = pair(llama())
    d, dref = pair(llama(num_hidden_layers=1))
    m.forward = torch.compile(m.forward, dynamic=True, **mg())
    d.forward = torch.compile(d.forward, dynamic=True, **mg())
    x = ids(2, 6)
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    x[0, :2] = 0
    base = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    for kw in (
        {"do_sample": True, "top_k": 10, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 2},
    ):
        found = []
        for g in (m, ref):
            torch.manual_seed(5)
            found.append(g.generate(x, attention_mask=mask, **kw, **base))
        same(*found, what=str(kw))
    one = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    om = torch.ones_like(one)
    same(
        m.generate(one, attention_mask=om, prompt_lookup_num_tokens=2, do_sample=False, **base),
        ref.generate(one, attention_mask=om, do_sample=False, **base),
    )
    same(
        m.generate(one, attention_mask=om, assistant_model=d, do_sample=False, **base),
        ref.generate(one, attention_mask=om, assistant_model=dref, do_sample=False, **base),
    )


def hostile_10_checkpointing_after_first_call():
    """train: gradient checkpointing switched on after the first call, dropout with a seed, train()/eval() alternating"""
    m, ref = pair(gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1))
    run = torch.compile(m, dynamic=True, **mg())
    for i, (train, ck) in enumerate(((True, False), (False, False), (True, True), (False, True), (True, False))):
        for g in (m, ref):
            g.train(train)
            (g.gradient_checkpointing_enable if ck else g.gradient_checkpointing_disable)()
        x = ids(2 + i % 2, 6)
        res = []
        for f, g in ((run, m), (ref, ref)):
            g.zero_grad()
            torch.manual_seed(i)
            o = f(input_ids=x, labels=x, use_cache=False)
            o.loss.backward()
            res.append(o.logits)
        same(*res, what=f"{i} ")
        same(grads(m), grads(ref), what=f"{i} grad ")


def hostile_11_freeze_unfreeze():
    """sharp-edges (frozen later): torch 2.15 traces again by itself when requires_grad_ changes between calls"""
    m, ref = pair(bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train())
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[0]": 4}]))
    for i in range(5):
        for g in (m, ref):
            for n, p in g.named_parameters():
                if "layer.0" in n or "embeddings" in n:
                    p.requires_grad_(i % 2 == 1)
        b = 4 - i % 2
        same_step(run, m, ref, input_ids=ids(b, 6), labels=torch.randint(0, 3, (b,)))


def hostile_12_lora_two_adapters():
    """use-with (peft): adding, switching, disabling, merging, unmerging and two adapters at a time trace again and are right"""
    import peft

    def cfg(r):
        return peft.LoraConfig(r=r, target_modules=["q_proj", "down_proj"])

    base = llama(num_hidden_layers=1)
    m = peft.get_peft_model(base, cfg(2))
    m.add_adapter("b", cfg(2))
    m.add_adapter("c", cfg(3))
    for n, p in m.named_parameters():
        if "lora_B" in n:
            nn.init.normal_(p, std=0.3)
    m, ref = pair(m)
    m.eval()
    ref.eval()
    run = torch.compile(m, dynamic=True, **mg())

    def check(what, b=2):
        x = ids(b, 5)
        with torch.no_grad():
            same(
                run(input_ids=x, use_cache=False).logits,
                ref(input_ids=x, use_cache=False).logits,
                what=what,
                rtol=1e-3,
                atol=1e-4,
            )

    check("default")
    check("default", 3)
    for name in ("c", "b"):
        m.set_adapter(name)
        ref.set_adapter(name)
        check(name)
    m.base_model.set_adapter(["default", "c"])
    ref.base_model.set_adapter(["default", "c"])
    check("two")
    with m.disable_adapter(), ref.disable_adapter():
        check("off")
    check("on again")
    m.merge_adapter()
    ref.merge_adapter()
    check("merged")
    m.unmerge_adapter()
    ref.unmerge_adapter()
    check("unmerged")


def hostile_13_load_assign_tie_cast():
    """train (parameters are shared, never copied): load_state_dict(assign=True), tied weights, .bfloat16(), .half(), back to float, between calls"""
    m, ref = pair(llama(num_hidden_layers=1, tie_word_embeddings=True))
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[0]": 4}]))

    def check(what, tol=1e-4):
        for b in (4, 3) if what != "torch.float16" else (4,):
            x = ids(b, 5)
            a, c = run(input_ids=x, labels=x, use_cache=False), ref(input_ids=x, labels=x, use_cache=False)
            same(a.logits, c.logits, rtol=tol, atol=tol, what=what)
            m.zero_grad()
            ref.zero_grad()
            a.loss.backward()
            c.loss.backward()
            same(grads(m), grads(ref), rtol=tol * 5, atol=tol, what=what)

    check("first")
    sd = llama(num_hidden_layers=1, tie_word_embeddings=True).state_dict()
    for g in (m, ref):
        g.load_state_dict({k: v.clone() for k, v in sd.items()}, assign=True)
        g.tie_weights()
    check("assigned")
    for g in (m, ref):
        g.lm_head.weight = nn.Parameter(g.lm_head.weight.detach().clone() * 2)
    check("untied")
    for dtype, tol in ((torch.bfloat16, 5e-2), (torch.half, 1e-2), (torch.float32, 1e-3)):
        m.to(dtype)
        ref.to(dtype)
        check(str(dtype), tol)


def hostile_14_deepcopy_pickle_state_dict():
    """README (works as in torch): deepcopy and pickle of a compiled module, state_dict keys, both copies independent"""
    import io

    m = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    ref = copy.deepcopy(m)
    m.compile(dynamic=True, **mg())
    x = torch.randn(5, 4)
    same(m(x), ref(x))
    same(state(m), state(ref))
    assert list(m.state_dict()) == list(ref.state_dict())
    c = copy.deepcopy(m)
    cref = copy.deepcopy(ref)
    with torch.no_grad():
        c[0].weight.add_(1)
        cref[0].weight.add_(1)
    for g, r in ((c, cref), (m, ref)):
        x = torch.randn(7, 4)
        same(g(x), r(x))
        same(state(g), state(r))
    buf = io.BytesIO()
    torch.save(m, buf)
    buf.seek(0)
    p = torch.load(buf, weights_only=False)
    r2 = copy.deepcopy(ref)
    x = torch.randn(3, 4)
    same(p(x), r2(x))
    same(state(p), state(r2))
    same(state(m), state(ref))
    o = torch.compile(copy.deepcopy(m), dynamic=True, **mg())
    o2 = copy.deepcopy(o)
    x = torch.randn(4, 4)
    same(o(x), o2(x))
    assert all(k.startswith("_orig_mod.") for k in o.state_dict())


def hostile_15_hooks_added_later():
    """sharp-edges (hooks): with skip_nnmodule_hook_guards = False hooks put on later are seen; tensor hooks on parameters too"""
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    m, ref = pair(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)))
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input[0]": 4}]))
    same_step(run, m, ref, torch.randn(4, 4))
    same_step(run, m, ref, torch.randn(3, 4))
    hs = [g[0].register_forward_hook(lambda mod, i, o: o * 2) for g in (m, ref)]
    same_step(run, m, ref, torch.randn(4, 4))
    same_step(run, m, ref, torch.randn(3, 4))
    for g in (m, ref):
        g[2].weight.register_hook(lambda gr: gr * 3)
    same_step(run, m, ref, torch.randn(4, 4))
    for h in hs:
        h.remove()
    same_step(run, m, ref, torch.randn(4, 4))
    same_step(run, m, ref, torch.randn(5, 4))


def hostile_16_no_grad_inference_mode_alternating():
    """train (grad mode): no_grad, inference_mode and grad alternating, also inputs made in inference mode (Inductor)"""
    m, ref = pair(bert("BertModel"))
    run = torch.compile(m, dynamic=True, **mg(IND, specialize=[{"inputs_embeds[0]": 4}]))
    for i, mode in enumerate(
        (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad, torch.no_grad)
    ):
        for b in (4, 3):
            with mode():
                x = ids(b, 6)
                e = ref.embeddings.word_embeddings(x).detach()
                a, c = run(inputs_embeds=e), ref(inputs_embeds=e)
                same(a, c)
                assert (
                    a.last_hidden_state.requires_grad == c.last_hidden_state.requires_grad
                    and a.last_hidden_state.is_inference() == c.last_hidden_state.is_inference()
                ), (i, mode)


def hostile_17_ema_gradscaler_uneven():
    """train: an EMA copy that is compiled too, GradScaler, gradients accumulated over an uneven last micro-batch in other variants"""
    m, ref = pair(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1)))
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input[0]": 8}]))
    emas = [AveragedModel(g, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) for g in (m, ref)]
    erun = torch.compile(emas[0], dynamic=True, **mg())
    scal = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    opts = [torch.optim.SGD(g.parameters(), 0.05, momentum=0.9) for g in (m, ref)]
    for s in range(3):
        x = torch.randn(19, 6)
        for f, g, sc, o, e in zip((run, ref), (m, ref), scal, opts, emas):
            o.zero_grad()
            for part in x.split(8):
                sc.scale(f(part).square().sum() / len(x)).backward()
            sc.unscale_(o)
            nn.utils.clip_grad_norm_(g.parameters(), 1.0)
            sc.step(o)
            sc.update()
            e.update_parameters(g)
        same(state(m), state(ref))
        same(state(emas[0]), state(emas[1]))
        emas[0].eval()
        emas[1].eval()
        with torch.no_grad():
            y = torch.randn(3 + s, 6)
            same(erun(y), emas[1](y))


def hostile_18_timm_features_dynamic_sizes():
    """use-with (timm): features_only, dynamic_img_size ViT, image sizes and batches that meet, both memory formats"""
    import timm

    m, ref = pair(timm.create_model("resnet10t", features_only=True, out_indices=(1, 2, 3)).eval())
    v, vref = pair(
        timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            embed_dim=24,
            depth=1,
            num_heads=2,
            dynamic_img_size=True,
            num_classes=3,
        ).eval()
    )
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"x[2]": {"multiple_of": 32}, "x[3]": {"multiple_of": 32}}]))
    vrun = torch.compile(v, dynamic=True, **mg(specialize=[{"x[2]": 48}]))
    with torch.no_grad():
        for i, (b, h, w) in enumerate(((3, 32, 32), (2, 64, 48), (48, 48, 48), (2, 64, 64))):
            x = torch.randn(b, 3, h, w)
            if i % 2:
                x = x.contiguous(memory_format=torch.channels_last)
            a, c = run(x), ref(x)
            same(a, c, rtol=1e-3, atol=1e-4)
            same(vrun(x), vref(x), rtol=1e-3, atol=1e-4)


def hostile_19_detector_varying_boxes():
    """use-with (torchvision): a detector with a compiled backbone trains with a varying number of boxes, none among them"""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn as make

    m = make(
        weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=96, trainable_backbone_layers=6
    ).train()
    ref = copy.deepcopy(m)
    m.backbone.compile(dynamic=True, **mg())
    for counts in ((2, 0), (3, 1)):
        x = [torch.rand(3, 64, 80) for _ in counts]
        t = [
            {
                "boxes": torch.tensor([[4.0, 4.0, 30.0 + i, 40.0] for i in range(n)]).reshape(-1, 4),
                "labels": torch.ones(n, dtype=torch.long),
            }
            for n in counts
        ]
        res = []
        for g in (m, ref):
            g.zero_grad()
            torch.manual_seed(1)
            l = g([i.clone() for i in x], [dict(d) for d in t])
            sum(l.values()).backward()
            res.append(l)
        same(*res, rtol=1e-3, atol=1e-4)
        same(grads(m), grads(ref), rtol=2e-2, atol=2e-3)
        same(state(m), state(ref), rtol=1e-3, atol=1e-4)


def hostile_20_unet_timesteps_and_cross_kwargs():
    """use-with (diffusers): timesteps of several kinds, encoder masks, return_dict off, sample sizes that change"""
    m, ref = pair(
        unet(
            block_out_channels=(8,), down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",)
        )
    )
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"sample[0]": 4}]))
    with torch.no_grad():
        for b, s in ((4, 8), (3, 16)):
            x, c = torch.randn(b, 4, s, s), torch.randn(b, 5, 12)
            mask = torch.ones(b, 5, dtype=torch.long)
            mask[0, 3:] = 0
            for t in (7, 2.5, torch.tensor(9), torch.randint(0, 100, (b,))) if b == 4 else (0, torch.tensor(3)):
                k = (
                    {"encoder_hidden_states": c, "timestep": t, "encoder_attention_mask": mask if t == 7 else None}
                    if not torch.is_tensor(t)
                    else {"encoder_hidden_states": c, "timestep": t, "return_dict": False}
                )
                same(run(x, **k), ref(x, **k), rtol=1e-3, atol=1e-4, what=f"{b} {s} {t} ")


def hostile_21_torchao_exchange_weights():
    """sharp-edges (subclasses) and use-with (torchao): int8 weights exchanged between calls, odd sizes, one row and many, bfloat16 (Inductor)"""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch._dynamo.config.specialize_float = True
    for dtype, tol, K in ((torch.float32, 1e-3, 33), (torch.bfloat16, 3e-2, 32), (torch.bfloat16, 3e-2, 40)):
        torch._dynamo.reset()

        def make():
            m = nn.Sequential(nn.Linear(K, 32), nn.GELU(), nn.Linear(32, 5)).to(dtype).eval()
            quantize_(m, Int8WeightOnlyConfig())
            return m

        m, other = make(), make()
        run = torch.compile(m, dynamic=True, **mg(IND, specialize=[{"input[0]": 1}, {"input[0]": 4}]))
        with torch.no_grad():
            for turn in range(3):
                for b in (3, 1, 4, 37):
                    x = torch.randn(b, K, dtype=dtype)
                    same(run(x), m(x), rtol=tol, atol=tol, what=f"{dtype} K {K} turn {turn} b {b}")
                if turn == 0:
                    m[0].weight, other[0].weight = other[0].weight, m[0].weight
                else:
                    m.load_state_dict(make().state_dict(), assign=True)


def hostile_22_torchao_dynamic_int8_cache_writes():
    """use-with (torchao): dynamic int8 activations, weights cast in a llama with a static cache that is written; tokens are the quantized model's"""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    from transformers import StaticCache

    torch._dynamo.config.specialize_float = True
    m = llama()
    quantize_(
        m,
        Int8DynamicActivationInt8WeightConfig(),
        filter_fn=lambda l, n: isinstance(l, nn.Linear) and "lm_head" not in n,
    )
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input_ids[1]": 1}]))
    caches = [StaticCache(config=m.config, max_cache_len=16) for _ in range(2)]
    with torch.no_grad():
        for b, t in ((2, 5), (2, 3)):
            for c in caches:
                c.reset()
            x, pos = ids(b, t), torch.arange(t)
            for step in range(4):
                o = [f(input_ids=x, past_key_values=c, position_ids=pos[None]).logits for f, c in zip((run, m), caches)]
                same(*o, rtol=1e-3, atol=1e-3, what=f"step {step}")
                x = o[1][:, -1:].argmax(-1)
                pos = pos[-1:] + 1


def hostile_23_threads_and_several_models():
    """README (compiled once however many threads ask) and serve: three compiled models called from four threads at once"""
    import threading

    ms = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8 + i)).eval() for i in range(3)]
    refs = [copy.deepcopy(x) for x in ms]
    runs = [torch.compile(x, dynamic=True, **mg(specialize=[{"input[0]": [2, 3, 4]}])) for x in ms]
    bad = []

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        r = random.Random(seed)
        try:
            with torch.no_grad():
                for _ in range(40):
                    i, b = r.randrange(3), r.randrange(2, 7)
                    x = torch.randn(b, 8, generator=g)
                    same(runs[i](x), refs[i](x))
        except BaseException as e:
            bad.append(e)

    ts = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    if bad:
        raise bad[0]
    if MG:
        assert stat("variants_compiled") <= 3 * 3 * 2 and stat("failures") == 0, multigraph_backend.stats()


class _Worker:
    def __init__(self, kw):
        self.l = torch.nn.Linear(3, 2) if CHILD else None
        self.kw = kw

    def __len__(self):
        return 6

    def __getitem__(self, i):
        run = torch.compile(self.l, **self.kw)
        x = torch.full((2 + i % 2, 3), float(i))
        return (run(x) - self.l(x)).abs().max().detach()


def hostile_24_dataloader_worker():
    """README (works as in torch): compiling and calling inside DataLoader workers (forked after the parent has called compiled code)"""
    data = _Worker(mg())
    assert data[0] < 1e-6
    for v in torch.utils.data.DataLoader(data, num_workers=2, timeout=60):
        assert v < 1e-5, v


def hostile_25_fullgraph_and_dataclass_returns():
    """README: fullgraph=True on transformers and on a function that returns nested dataclasses, dicts, None, ints, aliases of inputs (Inductor)"""
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Out(ModelOutput):
        a: torch.Tensor = None
        b: tuple = None
        c: torch.Tensor = None

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(5, 5)

        def forward(self, x, *, extra=None, flag=False, table=None):
            y = self.l(x)
            d = {"x": x, "n": x.shape[0], "v": y[:, 1:], "none": None, "t": x.t()}
            return (
                Out(a=y, b=(d["v"], x.view(-1)), c=extra * 2 if extra is not None else None),
                d,
                (y.sum() if flag else 3),
                (table["k"][0] + 1 if table else None),
            )

    m, ref = pair(Net())
    run = torch.compile(m, dynamic=True, fullgraph=True, **mg(IND, specialize=[{"x[0]": 4}, {"extra[0]": 7}]))
    for b in (4, 3, 5):
        for k in (
            {},
            {"flag": True},
            {"extra": torch.randn(7)},
            {"table": {"k": [torch.randn(b)]}},
            {"flag": True, "extra": torch.randn(6)},
        ):
            x = torch.randn(b, 5, requires_grad=True)
            o, r = run(x, **k), ref(x, **k)
            assert type(o[0]) is type(r[0]) and o[1]["x"] is x and isinstance(o[1]["n"], int)
            same(o, r)
    l, lref = pair(llama())
    lrun = torch.compile(l, fullgraph=True, dynamic=True, **mg())
    with torch.no_grad():
        for b in (2, 3):
            x = ids(b, 6)
            same(lrun(input_ids=x, use_cache=False), lref(input_ids=x, use_cache=False))


def hostile_26_misspelled_options():
    """options: an unknown name or a wrong value is OptionsError inside BackendCompilerFailed that names the cause and what was meant"""
    if not MG:
        return
    for opts, words in (
        ({"specialise": []}, ["specialise", "specialize"]),
        ({"compile": "eagre"}, ["compile", "eager"]),
        ({"specialize": [{"input[0]": "8"}]}, ["8"]),
        ({"specialize": {"input[0]": 8}}, ["list"]),
        ({"cudagraphs": "alway"}, ["cudagraphs", "auto"]),
        ({"pad": {"input[0]": [8, 4]}}, ["ascend"]),
        ({"memory_goal": "30 Gb of"}, ["memory_goal"]),
        ({"memory_goal": "1 GiB", "compiler": AE}, ["memory_goal"]),
        ({"limits": {"cuont": 3}}, ["count"]),
        ({"on_failure": True}, ["on_failure", "raise"]),
        ({"compiler": "aot_egaer"}, ["aot_eager"]),
        ({"specialize": [{"input[0]": {"multiple": 8}}]}, ["multiple_of"]),
        ({"inductor": {"max_autotun": True}}, ["max_autotune"]),
        ({"saved_tensors": [{"match": {"opp": "x"}, "pack": "keep"}]}, ["op"]),
    ):
        torch._dynamo.reset()
        run = torch.compile(nn.Linear(4, 4), backend="multigraph", options=opts)
        try:
            run(torch.ones(2, 4))
        except torch._dynamo.exc.BackendCompilerFailed as e:
            inner = e.inner_exception
            print(type(inner).__name__, inner)
            assert type(inner).__name__ == "OptionsError" and isinstance(inner, ValueError), (opts, repr(inner))
            assert all(w in str(inner) for w in words), (opts, str(inner))
        else:
            raise AssertionError(f"no error for {opts}")
    torch._dynamo.reset()
    run = torch.compile(
        nn.Linear(4, 4),
        backend="multigraph",
        dynamic=True,
        options={"compiler": AE, "on_failure": "raise", "specialize": [{"inptu[0]": 8}]},
    )
    try:
        run(torch.ones(2, 4))
    except Exception as e:
        assert "input[0]" in str(e), e
    else:
        raise AssertionError("no error for a name that matches nothing with on_failure=raise")


def hostile_27_packed_checkpointed_budget_inductor():
    """pack-saved-tensors: a budget, and Bits, Keep and Cast rules on GPT-2 with dropout; outputs do not change at all (Inductor)"""
    cfg = {"n_layer": 1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}
    m = gpt2(**cfg).train()

    def run_with(opts):
        torch._dynamo.reset()
        m.zero_grad()
        run = torch.compile(m, **mg(IND, **opts))
        torch.manual_seed(3)
        torch.cuda.manual_seed_all(3) if torch.cuda.is_available() else None
        o = run(input_ids=x, labels=x, use_cache=False)
        o.loss.backward()
        return o.logits.detach().clone(), {n: p.grad.clone() for n, p in m.named_parameters()}

    x = ids(4, 32)
    first = run_with({})
    if not MG:
        return
    from multigraph_backend import Bits, Cast, Keep, Match, Rule

    for opts in (
        {
            "saved_tensors": [
                Rule(Match(dtype="bool", min_bytes=0), Bits()),
                Rule(Match(op="aten::addmm", min_bytes=0), Keep()),
                Rule(Match(dtype="float32", min_bytes=0), Cast("bfloat16")),
            ]
        },
        {"saved_tensors_budget": 0.5},
    ):
        o = run_with(opts)
        assert torch.equal(o[0], first[0]), opts
        lossy = "Cast" in str(opts)
        for n in o[1]:
            e = ((o[1][n] - first[1][n]).norm() / first[1][n].norm().clamp(min=1e-12)).item()
            assert e < (0.03 if lossy else 1e-4), (opts, n, e)


def hostile_28_redirect_modes_and_named_backends():
    """use-with (redirect): what names another backend gets that; what names multigraph keeps its options; exit status and arguments as they were"""
    if not MG:
        return
    code = """
import sys, torch, multigraph_backend
torch.set_num_threads(1)
f = lambda x: x.sin() * x.shape[0]
a = torch.compile(f, backend="inductor", mode="reduce-overhead", dynamic=True); b = torch.compile(f, backend="aot_eager"); c = torch.compile(f, backend="multigraph", dynamic=True, options={"specialize": [{"x[0]": 5}], "compiler": "aot_eager"}); d = torch.compile(f)
seen = []
def mine(gm, i):
    seen.append(1); return gm.forward
e = torch.compile(f, backend=mine)
for n in (5, 6):
    x = torch.randn(n)
    for g in (a, b, c, d, e):
        torch._dynamo.reset() if g is e else None
        torch.testing.assert_close(g(x), f(x))
s = multigraph_backend.stats(); assert s["regions"] >= 3 and len(seen) >= 1 and s["variants_compiled"] >= 1, s
print(__name__, sys.argv[1:]); sys.exit(7)
"""
    assert "__main__ ['--a', 'b c']" in script(code, ["--a", "b c"], rc=7)
    assert "__main__ ['q']" in script(
        code, ["q"], module=None, env={"TORCH_COMPILE_OVERRIDE_BACKENDS": ">=0:multigraph"}.items(), rc=7
    )


def hostile_29_accelerate_mixed_precision_and_gather():
    """use-with (accelerate): with mixed_precision sizes are called args[1][0]; bf16 training is eager accelerate's"""
    from accelerate import Accelerator

    if not MG:
        return
    from multigraph_backend.integrations import accelerate_plugin

    m, ref = pair(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)))
    acc = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        dynamo_plugin=accelerate_plugin(options={"compiler": AE, "specialize": [{"args[1][0]": 4}]}, dynamic=True),
    )
    pm, popt = acc.prepare(m, torch.optim.SGD(m.parameters(), 0.1))
    ropt = torch.optim.SGD(ref.parameters(), 0.1)
    for b in (4, 3, 4):
        x = torch.randn(b, 6)
        o = pm(x)
        acc.backward(o.square().mean())
        popt.step()
        popt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            r = ref(x)
        r = r.float()
        assert o.dtype == r.dtype
        same(o, r, rtol=1e-2, atol=1e-2)
        r.square().mean().backward()
        ropt.step()
        ropt.zero_grad()
    same(state(acc.unwrap_model(pm, keep_torch_compile=False)), state(ref), rtol=2e-2, atol=2e-3)
    assert conditions().get("args[1][0] == 4", 0) >= 2, multigraph_backend.explain()


def hostile_30_eager_compile_warmup_training_report():
    """serve/train: compile='eager' and warmup() in training leave parameters, BatchNorm buffers, gradients and generators as they were; explain, stats, to_html work"""
    m, ref = pair(
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(0.3),
            nn.Flatten(2),
            nn.AdaptiveAvgPool1d(2),
            nn.Flatten(),
            nn.Linear(8, 2),
        ).train()
    )
    run = torch.compile(m, dynamic=True, **mg(specialize=[{"input[0]": [1, 4, 8]}], compile="eager") if MG else mg())
    m(torch.randn(2, 3, 9, 10)).sum().backward()
    ref.load_state_dict(m.state_dict())
    for p, q in zip(m.parameters(), ref.parameters()):
        q.grad = p.grad.clone()
    example = torch.randn(5, 3, 9, 10)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    if MG:
        account = multigraph_backend.warmup(run, example)
        assert account.ready, account
        assert torch.equal(torch.get_rng_state(), before), "generator was moved by warmup"
    same(state(m), state(ref))
    same(grads(m), grads(ref))
    for i, b in enumerate((4, 3, 8, 1)):
        x = torch.randn(b, 3, 9, 10)
        res = []
        for f, g in ((run, m), (ref, ref)):
            g.zero_grad()
            torch.manual_seed(i)
            o = f(x)
            o.square().sum().backward()
            res.append(o)
        same(*res)
        same(grads(m), grads(ref), rtol=1e-3, atol=1e-4)
        same(state(m), state(ref))
    if MG:
        assert "https://" not in multigraph_backend.explain().to_html(title="x") and stat("failures") == 0


# ------------------------------------------------------------------------------------------------ main


def child(name):
    torch.manual_seed(
        int.from_bytes(os.urandom(4), "little") if not os.environ.get("CLIENT_SEED") else int(os.environ["CLIENT_SEED"])
    )
    seed = torch.initial_seed()
    random.seed(seed)
    begun = time.time()
    try:
        globals()[name]()
    except BaseException:
        traceback.print_exc()
        print(f"RESULT FAIL seed {seed}")
        return 1
    note = ""
    if MG:
        s = multigraph_backend.stats()
        note = " ".join(f"{k}={s[k]}" for k in ("generic_calls", "variant_calls", "failures", "eager_calls") if k in s)
        if s["failures"] or s["eager_calls"]:
            print("NOTE", str(multigraph_backend.explain())[:4000])
    print(f"RESULT ok {time.time() - begun:.0f} s {note}")
    return 0


def parent(name, log):
    begun = time.time()
    try:
        r = subprocess.run([sys.executable, __file__, "--child", name], capture_output=True, text=True, timeout=100)
        text = r.stdout + r.stderr
        last = [x for x in r.stdout.splitlines() if x.startswith("RESULT ")]
        ok, note = (r.returncode == 0, last[-1][7:] if last else f"exit {r.returncode}")
    except subprocess.TimeoutExpired as e:
        text, ok, note = f"{e.stdout}\n{e.stderr}", False, "more than 100 s"
    os.makedirs(log, exist_ok=True)
    open(os.path.join(log, name + ".log"), "w").write(text)
    print(f"{'ok  ' if ok else 'FAIL'} {name}  {note}  [{time.time() - begun:.0f} s]", flush=True)
    return ok


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--jobs", type=int, default=1)
    p.add_argument("--child")
    p.add_argument("names", nargs="*")
    a = p.parse_args()
    if a.child:
        sys.exit(child(a.child))
    names = [n for n in globals() if n.startswith(("ordinary_", "hostile_"))]
    if a.names:
        names = [n for n in names if any(n.startswith(x) for x in a.names)]
    with ThreadPoolExecutor(a.jobs) as pool:
        logs = tempfile.mkdtemp(prefix=f"client-programs-{MODE}-")
        done = list(pool.map(lambda n: parent(n, logs), names))
    print(f"{sum(done)} of {len(done)} passed ({MODE})")
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
