"""``python -m rota`` is the command ``rota``."""

from rota.service.cli import main

main()
