"""What training and inference share: what a process needs to run a model at all.

The device and the processes, checkpoints and the state in them, losses, and the proof that a
model's numbers are right on a GPU. The settings `runtime.` are RuntimeConfig's, in device.py.
"""
