"""A Swin: attention in windows, half of them shifted, with a learned bias between every two places of a window.

    python examples/swin.py
    attnrewrite explain examples/swin.py:swin --input-size 3x112x112

That bias is the difficulty. Linear forms never make the score of two tokens, so that there is nothing to add it to:
they refuse, and say so. Asked to approximate, they keep of it what they can, and say that.
"""

import torch
from torch import nn
from tutorial import HOW, SIDE, attentive, command_line, pictures, show_conversion, show_sites

import attnrewrite as ar

SOURCE = "examples/swin.py:swin"


def swin() -> nn.Module:
    """timm's Swin made small: x [B, 3, SIDE, SIDE] -> logits [B, 10]; 4 windows of 7x7 tokens, and then one."""
    from attnrewrite.frontends.torchvision import import_torchvision

    import_torchvision()  # timm imports it; a CPU-only torch needs help with that
    import timm

    return attentive(
        timm.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=SIDE,
            patch_size=8,
            embed_dim=32,
            depths=(2, 1),
            num_heads=(2, 4),
            num_classes=10,
        )
    )


def main() -> None:
    torch.manual_seed(0)
    model, inputs = swin(), (torch.zeros(1, 3, SIDE, SIDE),)
    scan = ar.explain(model, inputs)
    show_sites(scan)

    print("\n1. which forms can stand at a site with a bias?")
    for variant, answer in ar.supported(scan)["site0"].items():
        print(f"  {variant}: {'yes' if answer is None else answer}")

    print("\n2. what is refused everywhere is an error, before any work")
    try:
        ar.convert(model, inputs, variant="l1", **HOW)
    except ar.NothingMatchedError as refused:
        print(f"  {refused}")

    print("\n3. l1, asked to keep a part of the bias")
    approximate = {"approximate": True}
    done = ar.convert(model, inputs, variant="l1", options=approximate, calibration=pictures(), **HOW)
    show_conversion(done)
    print(f"  $ {command_line(SOURCE, 'out/swin-l1', 'l1', approximate)}")

    print("\n4. masked keeps the bias between neighbours")
    done = ar.convert(model, inputs, variant="masked", options=approximate, calibration=pictures(), **HOW)
    show_conversion(done)
    print(f"  $ {command_line(SOURCE, 'out/swin-masked', 'masked', approximate)}")


if __name__ == "__main__":
    main()
