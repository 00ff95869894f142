"""Training of the embedded pair: its text, its tokenizer, its rows and its recipe."""
