"""Files of the artifacts that expert policies predict by."""
