"""The worker process: lease a subtask, fetch the model, train, push the update.

It keeps nothing that can't be lost: it can be killed at any line.
"""
