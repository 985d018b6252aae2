"""What computes: the model's executor, its pools of KV blocks, copies, captures and sampling.

Refuses to know responses and the Bus.
"""
