"""Schedules of our own for TVM: rules that take operators of an imported Relax module and give kernels for them.

Here is what any processor needs: reading the graph (`graph`), tensors as strided views of others (`view`), elementwise
arithmetic over views (`expression`), what a rule is (`rule`), and putting kernels in the operators' place (`rewrite`).
`cpu` holds the rules and kernels for CPUs. What no rule takes is left to TVM.
"""
