"""What is done with a trained model: evaluate it exactly, predict and explain, export it. Its source is a run's
checkpoint, or a folder that export wrote (weights.py).
"""
