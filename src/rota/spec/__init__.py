"""The nouns every part shares: values, events, commands, errors; nothing here has side effects."""
