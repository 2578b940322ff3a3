"""What a layer's experts compute, and by which products: torch's or the compiled ones."""
