"""Stands for an agent of Ray: does nothing, and ends with the raylet.

python -I -S no_agent.py
"""

import os
import select

select.select([os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))], [], [])
