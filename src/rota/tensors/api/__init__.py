"""What users of the tensor store call: the store, its channels, its events."""
