"""What every checkpoint has, whatever model it is of: files of weights, and a pack that is made of them once."""
