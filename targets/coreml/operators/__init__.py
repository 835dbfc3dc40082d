"""What each operator of Core ML's intermediate language (MIL) means, in torch.

Functions on tensors and a table by name. They know no program: who calls them walks it.
"""
