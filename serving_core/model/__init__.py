"""Models of the DSA families, read from Hugging Face directories."""
