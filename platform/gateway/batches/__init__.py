"""Files and batches: rows, content on disk, validation, the driving of lines, and the files that come out.

Knows what a batch is; refuses to know how a line is let in, computed or priced: a line is a request like any other.
"""
