"""Rules and kernels for CPUs: written once in terms of vectors of a profile's width, for every instruction set.

`vectors` is the vocabulary, `function` how a kernel is put together from it, `register_tile` what all products are made
of; then a file for each family of operators, its rule below its kernels, or a folder where that is more than a file.
`pipelines` holds the table of rules, in the order in which they are asked.
"""
