"""FX graphs of aten operations behind the GraphView that the matcher reads.

It says what each aten operator means, with its arguments. What attention is, is the matcher's to know.
"""
