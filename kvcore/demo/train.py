"""Trains the demo's byte-level decoder and writes `weights.safetensors`. Plain PyTorch, one file.

The text is the King James Bible as Debian packages it (see README.md for source and licence)::

    apt-get install bible-kjv
    bible -f 'gen1:1-rev22:21' > kjv.txt
    python train.py --text kjv.txt --out weights.safetensors --minutes 4

Runs on a GPU in minutes and on a CPU for a few steps (`--steps 20 --batch 4`). Every twentieth
chapter is held out; the averaged (EMA) weights that do best on those are kept, rounded to float16,
measured again as they will be shipped, and stored with the model's shape and the result as
metadata. The script ends by itself after `--steps` or `--minutes`, whichever comes first, and the
learning rate falls towards the nearer of the two ends. The seed fixes everything drawn at random;
a GPU may still add in another order.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")
HELD_OUT = (20, 10)  # chapters with number % 20 == 10
BITS = 1 / math.log(2)  # nats to bits


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The decoder's shape; stored as metadata beside the weights."""

    vocab: int = 256
    dim: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 384
    context: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-5


def clean(raw: str) -> list[str]:
    r"""The chapters of `bible`'s output: one verse per line, without the references.

    >>> clean("Ge1:1 In the beginning.\nGe1:2 And.\nGe2:1 Thus.\n")
    ['In the beginning.\nAnd.\n', 'Thus.\n']
    """
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in raw.splitlines():
        match = VERSE.match(line)
        if match:
            chapters.setdefault((match[1], match[2]), []).append(match[4].strip())
    return ["\n".join(verses) + "\n" for verses in chapters.values()]


def split(chapters: list[str]) -> tuple[Tensor, Tensor]:
    """(training bytes, held-out bytes), uint8; chapters are separated by an empty line."""
    every, first = HELD_OUT
    parts: tuple[list[str], list[str]] = ([], [])
    for number, chapter in enumerate(chapters):
        parts[number % every == first].append(chapter)
    train, held_out = ("\n".join(part).encode("ascii", "replace") for part in parts)
    return _tensor(train), _tensor(held_out)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale * self.weight).type_as(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the pair (i, i + D/2) of a head turns by position * base ** (-2i / D)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """Grouped-query attention with rotary positions, then SwiGLU; both residual, norms in front."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, nn.Dropout(dropout)
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        self.attn_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.qkv = nn.Linear(shape.dim, queries + 2 * keys, bias=False)
        self.out = nn.Linear(queries, shape.dim, bias=False)
        self.mlp_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.attn_norm(x), cos, sin))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.silu(gate) * up))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        rows, length, _ = x.shape
        heads = self.qkv(x).view(rows, length, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        q, k = rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v)
        group = s.heads // s.kv_heads  # query heads [group * j, group * (j + 1)) read KV head j
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, s.heads * s.head_dim))


class Decoder(nn.Module):
    """The whole model; input and output share one embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, nn.Dropout(dropout)
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        steps = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(shape.context).float(), shape.rope_base**-steps)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                scale = (2 * shape.layers) ** -0.5 if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, length, vocab] of the byte after each of `tokens` [rows, length]."""
        x = self.dropout(self.embed(tokens))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean nats per byte over `windows` [rows, length + 1]."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


class Windows:
    """Random training windows; half start at a verse, as prompts do, half anywhere."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        last = len(text) - length - 1
        starts = (text == ord("\n")).nonzero().flatten() + 1
        starts = starts[starts <= last]
        self.starts = starts[text[starts] != ord("\n")]
        self.last, self.span = last, torch.arange(length + 1, device=text.device)

    def draw(self, rows: int) -> Tensor:
        device = self.text.device
        verse = self.starts[torch.randint(len(self.starts), (rows // 2,), device=device)]
        anywhere = torch.randint(self.last + 1, (rows - rows // 2,), device=device)
        return self.text[torch.cat((verse, anywhere))[:, None] + self.span].long()


@torch.no_grad()
def held_out_bits(model: Decoder, text: Tensor) -> float:
    """Bits per byte on the held-out text, cut into windows of a whole context."""
    model.eval()
    length = model.shape.context
    count = (len(text) - 1) // length
    starts = length * torch.arange(count, device=text.device)
    spans = starts[:, None] + torch.arange(length + 1, device=text.device)
    parts = [model.loss(text[part].long()).item() * len(part) for part in spans.split(64)]
    return sum(parts) / count * BITS


@torch.no_grad()
def sample(model: Decoder, prompt: str, length: int) -> str:
    """The prompt with its greedy completion, without a cache."""
    tokens = torch.tensor([list(prompt.encode())], device=model.cos.device)
    for _ in range(min(length, model.shape.context - tokens.shape[1])):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", "replace")


class Run:
    """One training run: model, averaged model, optimiser, schedule and the best weights so far."""

    def __init__(self, args: argparse.Namespace, shape: Shape, device: str, begun: float) -> None:
        self.args, self.device, self.begun = args, device, begun
        self.model = Decoder(shape, args.dropout).to(device)
        self.average = copy.deepcopy(self.model).eval()
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() == 2]},
            {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.decay, fused=device == "cuda"
        )
        self.loss = self.model.loss
        self.best, self.best_bits, self.best_step = self.average.state_dict(), math.inf, 0

    def progress(self, step: int) -> float:
        """How much of the run is over, in [0, 1]: by steps or by the clock, the larger."""
        clock = (time.monotonic() - self.begun) / (60 * self.args.minutes)
        return min(1.0, max(step / self.args.steps, clock))

    def compile(self, windows: Windows) -> None:
        """Compiles the loss where that works; anything that fails leaves it as it is."""
        if self.args.no_compile or self.device != "cuda":
            return
        compiled = torch.compile(self.model.loss)
        try:
            with torch.autocast("cuda", torch.bfloat16):
                compiled(windows.draw(self.args.batch)).backward()
        except Exception as error:  # any compiler failure: eager is only slower
            print(f"not compiled: {type(error).__name__}", flush=True)
        else:
            self.loss = compiled
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, number: int, windows: Tensor) -> Tensor:
        """One optimiser step; returns the loss in nats, still on the device."""
        rise = min(1.0, (number + 1) / self.args.warmup)
        fall = 0.02 + 0.49 * (1 + math.cos(math.pi * self.progress(number)))  # 1 .. 0.02
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * rise * fall
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.loss(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        keep = min(self.args.ema, (number + 1) / (number + 10))
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - keep)
        return loss.detach()

    def check(self, number: int, loss: Tensor, held_out: Tensor) -> None:
        """Measures the averaged weights on the held-out text and keeps the best."""
        bits = held_out_bits(self.average, held_out)
        if bits < self.best_bits:
            self.best_bits, self.best_step = bits, number
            self.best = {name: value.clone() for name, value in self.average.state_dict().items()}
        seconds = time.monotonic() - self.begun
        print(
            f"step {number:6d}  {seconds:5.0f} s  train {loss.item() * BITS:.4f}  "
            f"held out {bits:.4f} bits/byte  best {self.best_bits:.4f}",
            flush=True,
        )


def train(run: Run, windows: Windows, held_out: Tensor) -> int:
    """Trains until the steps or the minutes are over; returns the number of steps."""
    run.compile(windows)
    number, run_over = 0, False
    while not run_over:
        run.model.train()
        loss = run.step(number, windows.draw(run.args.batch))
        number += 1
        run_over = number >= run.args.steps or run.progress(number) >= 1.0
        if number % run.args.check_every == 0 or run_over:
            run.check(number, loss, held_out)
    return number


def save(run: Run, path: Path, held_out: Tensor, facts: dict[str, Any]) -> None:
    """Rounds the best weights to float16, measures them as rounded and writes them."""
    stored = {name.replace(".weight", ""): value.half().cpu() for name, value in run.best.items()}
    run.average.load_state_dict({name: value.half().float() for name, value in run.best.items()})
    facts["held_out_bits_per_byte"] = round(held_out_bits(run.average, held_out), 4)
    facts["kept_step"] = run.best_step
    facts["parameters"] = sum(value.numel() for value in stored.values())
    metadata = {"shape": json.dumps(asdict(run.model.shape)), "training": json.dumps(facts)}
    save_file({name: value.contiguous() for name, value in stored.items()}, path, metadata)
    print(json.dumps(facts), f"{path.stat().st_size} bytes", flush=True)
    for prompt in ("In the beginning", "And the king said unto "):
        print("---", sample(run.average, prompt, 200), sep="\n", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    shape = Shape()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="output of `bible -f 'gen1:1-rev22:21'`")
    add("--out", type=Path, default=Path("weights.safetensors"))
    add("--minutes", type=float, default=4.0, help="stop and save after this long")
    add("--steps", type=int, default=30_000, help="stop and save after so many steps")
    add("--batch", type=int, default=128, help="windows per step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--decay", type=float, default=0.1, help="weight decay of matrices")
    add("--dropout", type=float, default=0.1)
    add("--ema", type=float, default=0.999, help="weight of the past in the average")
    add("--warmup", type=int, default=300, help="steps of rising learning rate")
    add("--check-every", type=int, default=500, help="steps between held-out checks")
    add("--seed", type=int, default=1611)
    add("--no-compile", action="store_true")
    for field in ("dim", "layers", "heads", "kv_heads", "hidden", "context"):
        add(f"--{field.replace('_', '-')}", type=int, default=getattr(shape, field))
    return parser.parse_args()


def main() -> None:
    """Reads the text, trains, saves."""
    begun = time.monotonic()
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    fields = ("dim", "layers", "heads", "kv_heads", "hidden", "context")
    shape = replace(Shape(), **{field: getattr(args, field) for field in fields})
    chapters = clean(args.text.read_text("ascii", "replace"))
    text, held_out = (part.to(device) for part in split(chapters))
    run = Run(args, shape, device, begun)
    print(f"{sum(p.numel() for p in run.model.parameters())} parameters on {device}, "
          f"{len(text)} bytes to learn, {len(held_out)} held out", flush=True)  # fmt: skip
    steps = train(run, Windows(text, shape.context), held_out)
    facts: dict[str, Any] = {
        "text": "King James Bible, Debian package bible-kjv-text",
        "steps": steps, "batch": args.batch, "context": shape.context, "dropout": args.dropout,
        "lr": args.lr, "seed": args.seed, "train_bytes": len(text), "held_out_bytes": len(held_out),
    }  # fmt: skip
    save(run, args.out, held_out, facts)


if __name__ == "__main__":
    main()
