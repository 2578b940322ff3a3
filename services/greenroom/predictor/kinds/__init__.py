"""The kinds of what a predictor makes: what each keeps of a sequence, when and how it is made, judged and served."""
