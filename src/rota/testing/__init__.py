"""For tests of what runs jobs over the interfaces of ``runtime``: a launcher in one process, under a virtual clock."""
