"""For people who try Varuna: a run that loses workers, and the proof that its losses stay the same.

In: nothing but the installed package. Out: a live run with kills and a return, a plain PyTorch loop on the same
samples, and a report that compares every loss.
"""
