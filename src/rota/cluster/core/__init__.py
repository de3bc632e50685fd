"""The core decides who gets which devices; it touches nothing."""
