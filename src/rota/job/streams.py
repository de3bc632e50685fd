"""The import path of the built-in loop of jobs with streams; stored jobs name it, so it stays."""

from rota.job.instance.streams import drain as drain
