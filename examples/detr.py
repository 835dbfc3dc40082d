"""A DETR: an encoder over the picture's tokens, and a decoder whose ten queries look for objects in them.

    python examples/detr.py
    attnrewrite explain examples/detr.py:detr --input-size 3x112x112

Three kinds of attention, of which the encoder's is the one that grows with the picture. Not every form can stand at
each: `masked` needs an image, and `mobile` pairs each query with the key of the same token.
"""

import torch
from torch import Tensor, nn
from tutorial import HOW, SIDE, attentive, command_line, pictures, show_conversion, show_sites

import attnrewrite as ar

SOURCE = "examples/detr.py:detr"
# For each attempt: the variant, the sites to keep (a pattern of names), and what there is to see.
ATTEMPTS = (
    ("masked", (), "masked stands where the tokens are an image: in the encoder"),
    ("mobile", ("*decoder*.self_attn",), "mobile stands where queries and keys are the same tokens; some are kept"),
)


class Detector(nn.Module):
    """A detector of transformers as a function of tensors: x [B, 3, H, W] -> classes [B, Q, C], boxes [B, Q, 4]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(pixel_values=x)
        return found.logits, found.pred_boxes


def detr() -> nn.Module:
    """transformers' DETR made small, with a small ResNet before it."""
    from attnrewrite.frontends.torchvision import import_torchvision

    import_torchvision()  # transformers imports it; a CPU-only torch needs help with that
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        backbone_config=backbone,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=10,
        num_labels=5,
    )
    return Detector(attentive(DetrForObjectDetection(config)))


def main() -> None:
    torch.manual_seed(0)
    model, inputs = detr().eval(), (torch.zeros(1, 3, SIDE, SIDE),)
    show_sites(ar.explain(model, inputs))
    x = torch.from_numpy(pictures()[:8]).permute(0, 3, 1, 2) / 127.5 - 1
    for number, (variant, keep, what) in enumerate(ATTEMPTS, start=1):
        print(f"\n{number}. {what}")
        done = ar.convert(model, inputs, variant=variant, keep=keep, calibration=pictures(), **HOW)
        show_conversion(done)
        with torch.no_grad():
            boxes, before = done.module(x)[1], model(x)[1]
        moved = (boxes - before).abs().mean() / before.std(0).mean()
        print(f"  its boxes moved by {moved:.2%} of what tells one picture's from another's")
        print(f"  $ {command_line(SOURCE, f'out/detr-{variant}', variant, keep=keep)}")


if __name__ == "__main__":
    main()
