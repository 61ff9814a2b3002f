"""Planning beside training: in a process of its own, of low priority, that imports no torch.

[Note: a planner beside the steps]
A thread would share the interpreter's lock with the training loop, which then waits for it at every turn; and what solvers
allocate would be the trainer's memory. So a fresh interpreter runs `server.py`: it is no fork, has none of the trainer's
threads, devices or `__main__`, and is given the trainer's import path only. Requests and answers are JSON in unnamed files
whose descriptors go over a socket (`channel.py`), so nobody waits for the other to read. The process ends when the last engine
of the trainer is closed, when the trainer's end of the socket closes, and when its parent is another process than it was, as
after a `kill -9` of the trainer. Ctrl-C does not reach it: it is in a process group of its own.
"""
