"""BatchPolicy: which rows form the next step."""
