"""What is measured of a model, a file each."""
