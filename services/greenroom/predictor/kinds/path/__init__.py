"""The weights by which a token's picks in earlier layers foresee its later ones."""
