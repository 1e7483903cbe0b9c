"""LAMB in a plain PyTorch loop, with nothing else from the package: parameter groups, warm-up, gradient clipping.

    python examples/lamb_in_a_plain_loop.py

It takes seconds on a CPU and prints the accuracy on points that it did not train on.
"""

import torch
from torch import nn

from overnight.optim import Lamb

STEPS, BATCH = 100, 256


def spirals(n: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n points on the three arms of a spiral, (n, 2), and the arm of each point, (n)."""
    arm = torch.randint(3, (n,), generator=draw)
    radius = torch.rand(n, generator=draw)
    angle = 4 * radius + arm * (2 * torch.pi / 3) + 0.15 * torch.randn(n, generator=draw)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), arm


def main() -> None:
    """Train, and print the loss and the accuracy."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    # Biases and norms get neither weight decay nor a trust ratio, as in the published runs.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0, "trust_ratio": False}]
    optimizer = Lamb(groups, lr=0.05, max_grad_norm=1.0)
    # Large batches need a warm-up; any of torch's schedulers works with the optimizer.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS, pct_start=0.2, cycle_momentum=False)
    for step in range(1, STEPS + 1):
        x, y = spirals(BATCH, draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  gradient norm {optimizer.grad_norm:.3f}")
    x, y = spirals(3000, draw)
    print(f"accuracy {100 * (model(x).argmax(1) == y).double().mean().item():.1f} %")


if __name__ == "__main__":
    main()
