"""What is measured side by side: all-reduces behind `base.AllReduceRank`, and ways to fetch a state (`fetch`).

Only this package may import torchft.
"""
