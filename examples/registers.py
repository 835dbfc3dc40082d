"""A DINOv2-like ViT: one class token and four registers stand before the image's tokens.

    python examples/registers.py
    attnrewrite explain examples/registers.py:dinov2 --input-size 3x112x112

The five are found in the graph. Linear forms keep exact softmax rows for them (`exact_prefix`): they are few, so that
this costs little, and everything that the model says goes through them.
"""

import torch
from torch import nn
from tutorial import HOW, SIDE, attentive, command_line, pictures, show_conversion, show_sites

import attnrewrite as ar

SOURCE = "examples/registers.py:dinov2"
# For each attempt: the variant, its options, and what there is to see.
ATTEMPTS = (
    ("l1", {}, "l1, linear in the tokens, with exact rows for the five"),
    ("l1", {"exact_prefix": False}, "the same without these rows"),
    ("masked", {"size": 5}, "each token sees 5x5 neighbours, and the five, who see all"),
)


def dinov2() -> nn.Module:
    """timm's ViT with registers, made small: x [B, 3, SIDE, SIDE] -> logits [B, 10]."""
    from attnrewrite.frontends.torchvision import import_torchvision

    import_torchvision()  # timm imports it; a CPU-only torch needs help with that
    import timm

    return attentive(
        timm.create_model(
            "vit_small_patch14_reg4_dinov2",
            img_size=SIDE,
            embed_dim=64,
            depth=2,
            num_heads=4,
            num_classes=10,
            init_values=1.0,  # a fresh DINOv2 starts with layer scales of 1e-5, and would not attend at all
        )
    )


def main() -> None:
    torch.manual_seed(0)
    model, inputs = dinov2(), (torch.zeros(1, 3, SIDE, SIDE),)
    show_sites(ar.explain(model, inputs))
    for number, (variant, options, what) in enumerate(ATTEMPTS, start=1):
        print(f"\n{number}. {what}")
        done = ar.convert(model, inputs, variant=variant, options=options, calibration=pictures(), **HOW)
        show_conversion(done)
        print(f"  $ {command_line(SOURCE, f'out/registers-{number}', variant, options)}")


if __name__ == "__main__":
    main()
