"""The Python client: everything that the REST API offers, as typed Python.

::

    client = Client("http://127.0.0.1:8700", token)
    job = client.submit_directory(JobSpec.load(Path("job.yaml")))
    for event in job.events(follow=True):
        print(event.text)
    job.wait().download(Path("model.safetensors"))

:mod:`vcasgd.schemas` has the types of all results.
"""

from vcasgd.client.client import Client, load
from vcasgd.client.following import PATIENCE_SECONDS
from vcasgd.client.job import Job
from vcasgd.client.problems import may_work_later

__all__ = ["PATIENCE_SECONDS", "Client", "Job", "load", "may_work_later"]
