"""reuse, our own: the probability of an expert's next use, learnt from what each sequence used before."""
