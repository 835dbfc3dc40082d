"""`--variant auto`: which form stands at which site within a budget of accuracy or latency.

It measures candidates alone, solves for the best combination and proves the budget on images that were not fitted. It
knows calibration, evaluation and targets, and nothing of files or pages.
"""
