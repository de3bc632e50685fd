"""Types shared by all packages: values, events, commands, errors; nothing here reads or writes anything."""
