"""The job file: text to JobSpec and back, or every mistake in it at its place."""

from rota.service.jobfile.problems import Problem as Problem
from rota.service.jobfile.reader import placed as placed
from rota.service.jobfile.reader import problems_of as problems_of
from rota.service.jobfile.reader import read_job as read_job
