"""The fleet: machines and the workers on them.

One round of ``loop``:

``observe``  read machines, workers, jobs, and pools as plain data
``status``   publish them
``decide``   in :mod:`vcasgd.fleet.plan`, and ``learners`` for several learners per machine
``act``      execute the decisions

These modules keep what the rounds share:

``pools``            pools and their providers
``cloud_cache``      machines and prices, as providers reported them last
``workplaces``       the machines that run workers, what they report, and their orders
``demands``          what jobs ask for
``clearance``        which pools may see which jobs
``launch_history``   how markets answered
``costs``            what machines cost which job
``speeds``           how fast machines are
``events``           changes between two rounds
``machine_timeline`` what each machine of a job did
``restart_backoff``  when a crashed worker is restarted
``boot``             what a new machine runs
``worker_names``     names of workers
"""
