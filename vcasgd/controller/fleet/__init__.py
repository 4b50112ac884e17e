"""The fleet: machines and the workers on them.

One round of ``loop``:

``observe``  read machines, workers, jobs, and pools as plain data
``decide``   in :mod:`vcasgd.fleet.plan`, and ``learners`` for several learners per machine
``act``      execute the decisions
``view``     publish what was observed, and events about what has changed

The rounds share, by ``fleet``:

``pools``            pools and their providers
``cloud_calls``      calls to clouds on threads, and how markets answered
``cloud_cache``      machines and prices, as providers reported them last
``workplaces``       the machines that run workers, what they report, and their orders
``demands``          what jobs ask for, and which pools may see their data
``costs``            what machines cost which job, and how fast they are
``machine_timeline`` what each machine of a job did
"""
