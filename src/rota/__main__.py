"""``python -m rota`` is the command ``rota``."""

from rota.service.cli.app import main

main()
